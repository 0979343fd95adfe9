//! Renders a chat:
//! `cargo run --example render -- chat_template.jinja <<<'[{"role": "user", "content": "Hi"}]'`.

use std::error::Error;

use lowbit_jinja::Template;

fn main() -> Result<(), Box<dyn Error>> {
    let file = std::env::args_os().nth(1).ok_or("name a file with a chat template")?;
    let template = Template::parse(&std::fs::read_to_string(file)?)?;
    let messages = serde_json::from_reader(std::io::stdin())?;
    let variables = [("messages".to_string(), messages), ("add_generation_prompt".to_string(), true.into())];
    print!("{}", template.render(&variables.into())?);
    Ok(())
}

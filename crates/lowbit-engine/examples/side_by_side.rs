//! Several prompts at once, whose replies come as they are written:
//! `cargo run --release -p lowbit-engine --example side_by_side -- models/demo-4bit`.

use lowbit_engine::{Backend, Engine, EngineOptions, Event, GenerationOptions, Request};
use lowbit_files::{Checkpoint, Tokenizer};
use lowbit_kernels::Device;
use lowbit_models::Model;
use std::error::Error;
use std::ops::ControlFlow::Continue;
use std::sync::mpsc::channel;

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).ok_or("the folder of a model is wanted")?;
    let checkpoint = Checkpoint::open(folder.as_ref())?;
    let (tokenizer, device) = (Tokenizer::from_checkpoint(&checkpoint)?, Device::cpu(None)?);
    let engine = Engine::start(Model::load(&checkpoint, &device)?, EngineOptions::new(&device))?;
    let prompts = ["A vector is", "The function returns", "To sort a list,"];
    let (sender, events) = channel();
    let mut handles = vec![];
    for (number, prompt) in prompts.into_iter().enumerate() {
        let stops = tokenizer.eos_ids().to_vec();
        let options = GenerationOptions::default().with_max_tokens(40).with_stop_ids(stops);
        let request = Request::new(tokenizer.encode(prompt, true)?).with_options(options);
        let sender = sender.clone();
        let sink = move |event| sender.send((number, event)).map_or(Continue(()), Continue);
        handles.push(engine.submit(request, Box::new(sink))?);
    }
    drop(sender);
    let mut replies = vec![vec![]; prompts.len()];
    for (number, event) in events {
        match event {
            Event::Token { id, .. } => replies[number].push(id),
            Event::Finished { .. } => println!("{}{}", prompts[number], tokenizer.decode(&replies[number])?),
            Event::Failed(error) => eprintln!("{}: {error}", prompts[number]),
            _ => {}
        }
    }
    Ok(())
}

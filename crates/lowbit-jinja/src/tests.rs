use std::time::{Duration, Instant};

use serde_json::json;

use super::*;

fn with(source: &str, variables: &[(&str, Json)]) -> Result<String, Error> {
    let variables = variables.iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
    Template::parse(source)?.render(&variables)
}

fn render(source: &str) -> Result<String, Error> {
    with(source, &[("messages", json!([{"role": "user", "content": "hi"}]))])
}

/// The peer's own results; where it raises, an error is wanted, in words of our own.
#[test]
fn small_templates_render_as_in_jinja2() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors.json");
    let vectors: Json = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let variables: BTreeMap<String, Json> = serde_json::from_value(vectors["variables"].clone()).unwrap();
    let cases = vectors["cases"].as_array().unwrap();
    assert!(cases.len() > 130);
    let mut wrong = vec![];
    for case in cases {
        let source = case["source"].as_str().unwrap();
        let got = Template::parse(source).and_then(|template| template.render(&variables));
        match (&got, case["text"].as_str()) {
            (Ok(text), Some(want)) if text == want => {}
            (Err(_), None) => {}
            _ => wrong.push(format!("{source}\n  {got:?}\n  should be {case}")),
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[track_caller]
fn bounded(source: &str) -> Result<String, String> {
    let start = Instant::now();
    let result = render(source).map_err(|error| error.to_string());
    let name: String = source.chars().take(80).collect();
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}: {name}", start.elapsed());
    match &result {
        Ok(text) => assert!(text.len() <= meter::OUTPUT + (1 << 20), "{} bytes: {name}", text.len()),
        Err(problem) => {
            assert!(problem.len() < 3000 && !problem.contains("interpreter failed"), "{problem}: {name}");
        }
    }
    result
}

#[track_caller]
fn refused(source: &str) -> String {
    bounded(source).expect_err("should be refused")
}

#[test]
fn no_operation_takes_all_memory() {
    for source in [
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x|replace('a', 'aa') %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% else %}xxxxxxxxxxxxxxxx{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ [1] * 1000000000 | list }}",
        "{{ [1] * 1000000000 }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 'a' * 10 ** 30 }}",
        "{{ (1, 2) * 10 ** 18 }}",
        "{{ [1] | slice(10 ** 12) | list }}",
        "{{ [1] | batch(10 ** 12, 'x') | list }}",
        "{{ 'a' | indent(10 ** 12, true) }}",
        "{{ 'a' | center(10 ** 12) }}",
        "{{ 'a'.center(10 ** 12) }}",
        "{{ 'a'.ljust(10 ** 12) }}{{ 'a'.rjust(10 ** 12) }}",
        "{{ 'a'.zfill(10 ** 12) }}",
        "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
        "{{ ('a' * 100000)|replace('', 'b' * 100000) }}",
        "{{ ('a' * 100000).join(range(100000)|map('string')) }}",
        "{{ range(100000)|join('a' * 100000) }}",
        "{{ messages|tojson(indent=40000000000) }}",
        "{{ messages|tojson(separators=('a' * 40000000, 'b' * 40000000)) }}",
        "{{ '%999999999s'|format('a') }}{{ '%.70000f'|format(1.5) }}",
        "{{ '%.70000f'|format(1.5) }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '{:>999999999}'.format('a') }}",
        "{{ '{:.70000f}'.format(1.5) }}",
        "{{ strftime_now('%999999999Y') }}",
        "{{ strftime_now('%Y' * 100000000) }}",
        "{{ 'a\\tb'.expandtabs(10 ** 9) }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    ] {
        refused(source);
    }
}

#[test]
fn every_loop_ends() {
    for source in [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
        "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{% if 'b' in x %}{% endif %}{% endfor %}",
        "{% set x = range(99999)|list %}{% for i in x %}{% if -1 in x %}{% endif %}{% endfor %}",
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}\
         {% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x < ns.y }}",
        "{% set x = 'a' * 9999999 %}{% for i in range(99999) %}{{ x.strip('bcd' * 99999) }}{% endfor %}",
    ] {
        refused(source);
    }
    assert_eq!(bounded("{{ 'abc'.count('') }}").unwrap(), "4");
    assert_eq!(bounded("{{ range(100000)|sum }}").unwrap(), "4999950000");
}

#[test]
fn nothing_nests_to_the_end_of_the_stack() {
    let nested = |open: &str, middle: &str, close: &str, count: usize| {
        [open.repeat(count), middle.to_string(), close.repeat(count)].concat()
    };
    for count in [8_000, 100_000] {
        for (open, middle, close) in [
            ("not ", "1", ""),
            ("- ", "1", ""),
            ("+", "1", ""),
            ("(", "1", ")"),
            ("[", "1", "]"),
            ("{1:", "1", "}"),
            ("x[", "1", "]"),
            ("f(", "1", ")"),
            ("1 if 1 else ", "1", ""),
            ("1|default(", "1", ")"),
            ("1 is eq ", "1", ""),
            ("1 ", "", "+ 1"),
            ("1 ", "", "** 1"),
            ("x", "", ".x"),
            ("x", "", "[0]"),
            ("x", "", "()"),
            ("x", "", "|list"),
            ("x", "", " if 1"),
        ] {
            let expression = if middle.is_empty() {
                open.to_string() + &close.repeat(count)
            } else {
                nested(open, middle, close, count)
            };
            refused(&format!("{{{{ {expression} }}}}"));
        }
        refused(&nested("{% if 1 %}", "x", "{% endif %}", count));
        refused(&nested("{% for i in [1] %}", "x", "{% endfor %}", count / 2));
        refused(&nested("{% macro f() %}", "x", "{% endmacro %}", count / 2));
        refused(&("{% set ".to_string() + &"(".repeat(count) + "a" + &")".repeat(count) + " = 1 %}"));
    }
    for source in [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f() %}{% call f() %}{% endcall %}{{ caller() }}{% endmacro %}{{ f() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = {'a': ns.x} %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = [ns.x]|map('list') %}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% for i in range(9999) %}{% set ns.x = namespace(x=ns.x) %}{% endfor %}{{ ns }}",
    ] {
        refused(source);
    }
    // Long, but not deep.
    let many = "{% elif x %}".repeat(8_000);
    assert_eq!(bounded(&format!("{{% if x %}}{many}{{% else %}}y{{% endif %}}")).unwrap(), "y");
    assert_eq!(bounded(&format!("{{{{ 0{} }}}}", " or 0".repeat(50_000))).unwrap(), "0");
    assert_eq!(bounded(&format!("{{{{ 0{} }}}}", " ~ 0".repeat(50_000))).unwrap().len(), 50_001);
}

#[test]
fn odd_numbers_and_sources_are_refused_or_computed() {
    assert!(refused("{{ 2 ** 10 ** 30 }}").contains("bits"));
    assert!(refused("{{ 99999999999999999999999999999999999999999 }}").contains("bits"));
    assert_eq!(bounded("{{ 2 ** 126 }}").unwrap(), (1i128 << 126).to_string());
    assert_eq!(bounded("{{ (-1) ** 10 ** 30 }}").unwrap(), "1");
    assert!(refused("{{ 10.0 ** 999 }}").contains("range"));
    assert!(refused("{{ range(10 ** 30) }}").contains("range"));
    assert_eq!(
        bounded("{{ [1, 2][10 ** 30] }}{{ [1, 2][:10 ** 30] }}{{ 'ab'[-(10 ** 30):] }}").unwrap(),
        "[1, 2]ab"
    );
    assert!(refused("{{ -(2 ** 126) * 2 - 1 - 1 }}").contains("bits"));
    assert!(refused(&"x".repeat(MAX_SOURCE + 1)).contains("bytes"));
    for source in
        ["{{", "{%", "{#", "{{ '", "{{ \"\\", "{% raw %}", "{{ } }}", "{{ § }}", "{{ 1a }}", "{{ é.é }}"]
    {
        refused(source);
    }
}

/// A variable that is not used is not even looked at; one that nests too deeply is named.
#[test]
fn deep_values_are_named() {
    let mut deep = json!(1);
    for _ in 0..300 {
        deep = json!([deep]);
    }
    assert_eq!(with("x", &[("tools", deep.clone())]).unwrap(), "x");
    let problem = with("{{ tools }}", &[("tools", deep)]).unwrap_err().to_string();
    assert!(problem.starts_with("variable tools: a value nests deeper"), "{problem}");
}

#[test]
fn errors_name_the_line_and_hide_escapes() {
    assert_eq!(refused("a\n\n{{ x.y }}"), "'x' is undefined (line 3)");
    assert_eq!(refused("\n{% if %}"), "expected an expression, got '%}' (line 2)");
    let problem = refused("{{ raise_exception('\x1b[2J' ~ 'x' * 99999) }}");
    assert!(problem.starts_with("\\u{1b}[2Jxxx") && problem.len() < 2100, "{problem}");
}

#[test]
fn dates_are_pythons() {
    let when: jiff::Zoned = "2026-03-07T08:09:10[UTC]".parse().unwrap();
    let text = time::strftime("%d %b %Y, %A %B %-d %H:%M:%S, 20260307 %j", &when).unwrap();
    assert_eq!(text, "07 Mar 2026, Saturday March 7 08:09:10, 20260307 066");
    assert_eq!(render("{{ strftime_now('%Y') }}").unwrap(), jiff::Zoned::now().year().to_string());
    assert!(refused("{{ strftime_now('%!') }}").starts_with("strftime_now: "));
    assert!(time::strftime("%1000Y", &when).unwrap_err().message().contains("width"));
}

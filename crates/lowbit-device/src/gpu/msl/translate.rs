//! A generated kernel in the Metal Shading Language as C++ for clang. MSL is C++ with attributes,
//! so little changes: threadgroup memory, which C++ does not have, and an entry that gives a kernel
//! its arguments. Refuses what breaks a limit of Metal or wgpu.

use crate::gpu::compile::Source;
use std::collections::HashMap;

/// Metal's limits on every Apple GPU ("Metal feature set tables").
const THREADS: u32 = 1024;
const SHARED: usize = 32 << 10;
/// Of Metal's 31 buffers wgpu keeps two (`MAX_USABLE_BUFFERS` in wgpu-hal 30.0.1's
/// `metal/adapter.rs`).
const BUFFERS: usize = 29;

/// The pragma that keeps Metal and clang from taking floats for finite. Both want it at the start
/// of a block.
const SAFE: [&str; 2] = ["#pragma METAL fp math_mode(safe)", "#pragma float_control(precise, on)"];

/// The entry's name, for every kernel.
pub(super) const ENTRY: &str = "msl_kernel";

/// A kernel in C++.
#[derive(Debug)]
pub(super) struct Translated {
    pub text: String,
    /// Bytes of threadgroup memory.
    pub shared: usize,
}

/// The C++ of `source`, the same for the same kernel in every process. CubeCL orders the parameters
/// for positions in the grid by chance, and numbers variables in that order: here they are sorted,
/// and numbered as they come.
///
/// # Errors
/// The limit that the kernel breaks, or the part of its text that is unknown here.
pub(super) fn translate(source: &Source) -> Result<Translated, String> {
    let text = &source.text;
    if words(text).any(|word| word == "double") {
        return Err("Metal has no double".into());
    }
    let (head, rest) = split(text, "[[max_total_threads_per_threadgroup(")?;
    let (threads, rest) = split(rest, ")]] [[kernel]] void ")?;
    let threads: u32 = threads.parse().map_err(|_| format!("{threads} threads per threadgroup"))?;
    if threads > THREADS {
        return Err(format!("{threads} threads per threadgroup, and Metal has at most {THREADS}"));
    }
    let (_, rest) = split(rest, "(")?;
    let (signature, body) = split(rest, ") {\n")?;
    let mut parameters = commas(signature).map(Parameter::new).collect::<Result<Vec<_>, _>>()?;
    let buffers = parameters.iter().filter(|it| it.attribute == "buffer").count();
    if buffers > BUFFERS {
        return Err(format!("{buffers} buffers, and wgpu binds at most {BUFFERS} on Metal"));
    }
    // Stable: buffers keep their order.
    parameters.sort_by_key(|it| if it.attribute == "buffer" { "" } else { it.attribute });
    let declarations: Vec<_> = parameters.iter().map(|it| it.declaration).collect();
    let mut bound = 0..;
    let values: Vec<_> = parameters.iter().map(|it| it.value(&mut bound)).collect();
    let (body, shared) = with_shared(&body.replace(SAFE[0], SAFE[1]))?;
    let entry = format!("extern \"C\" __attribute__((visibility(\"default\"))) void {ENTRY}(void** buffers)");
    let text = format!(
        "{head}static void run_thread({}) {{\n{body}\n{entry} {{ run_thread({}); }}\n",
        declarations.join(", "),
        values.join(", "),
    );
    Ok(Translated { text: renumbered(&without_includes(&text)), shared })
}

/// A parameter of a kernel.
struct Parameter<'a> {
    /// Its type and name.
    declaration: &'a str,
    attribute: &'a str,
}

impl<'a> Parameter<'a> {
    /// CubeCL's last buffer, which holds scalars, has no attribute: it is bound behind the others.
    fn new(text: &'a str) -> Result<Self, String> {
        let (declaration, attribute) = text.split_once("[[").unwrap_or((text, "buffer]]"));
        let end = attribute.find(['(', ']']).ok_or_else(|| format!("the parameter {text}"))?;
        Ok(Self { declaration: declaration.trim(), attribute: &attribute[..end] })
    }

    /// The entry's argument for it.
    fn value(&self, bound: &mut impl Iterator<Item = usize>) -> String {
        match self.attribute {
            "buffer" => format!("msl::Buffer{{buffers[{}]}}", bound.next().expect("it does not end")),
            position => format!("msl::{position}()"),
        }
    }
}

/// The body with pointers in place of `alignas(16) threadgroup char name[64];`, and the bytes of
/// all of them.
fn with_shared(body: &str) -> Result<(String, usize), String> {
    let (mut text, mut rest, mut size) = (String::with_capacity(body.len()), body, 0usize);
    while let Some((before, after)) = rest.split_once("alignas(") {
        let (declaration, after) = split(after, ";")?;
        let array = declaration.split_once(") threadgroup char ").and_then(|(alignment, array)| {
            let (name, len) = array.strip_suffix(']')?.split_once('[')?;
            Some((alignment.parse::<usize>().ok()?, name, len.parse::<usize>().ok()?))
        });
        text += before;
        match array {
            Some((alignment, name, len)) => {
                let start = size.next_multiple_of(alignment);
                text += &format!("char* const {name} = msl_shared({start});");
                size = start + len;
            }
            // A type's.
            None => text += &format!("alignas({declaration};"),
        }
        rest = after;
    }
    text += rest;
    // Pointers to it have a star, barriers other words.
    let unknown =
        text.lines().find(|line| words(line).any(|word| word == "threadgroup") && !line.contains('*'));
    if let Some(line) = unknown {
        return Err(format!("threadgroup memory is declared in an unknown way: {line}"));
    }
    if size > SHARED {
        return Err(format!("{size} bytes of threadgroup memory, and Metal has {SHARED}"));
    }
    Ok((text, size))
}

/// The text before and behind `at`.
fn split<'a>(text: &'a str, at: &str) -> Result<(&'a str, &'a str), String> {
    text.split_once(at).ok_or_else(|| format!("the kernel's text has no {at:?}"))
}

/// The parts between commas that stand outside of brackets.
fn commas(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    text.split(move |c| {
        depth += i32::from("(<[{".contains(c)) - i32::from(")>]}".contains(c));
        c == ',' && depth == 0
    })
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Metal's headers are one here, which stands before every kernel.
fn without_includes(text: &str) -> String {
    text.lines()
        .filter(|line| !line.starts_with("#include <metal_"))
        .fold(String::new(), |all, line| all + line + "\n")
}

/// The text with other numbers in the names `v12` and `name_v12` of variables: as they come.
fn renumbered(text: &str) -> String {
    let mut numbers = HashMap::new();
    let (mut result, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find('v') {
        let (before, after) = rest.split_at(at + 1);
        let digits = after.len() - after.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, next) = after.split_at(digits);
        result += before;
        let starts = before[..at].chars().next_back().is_none_or(|c| c == '_' || !c.is_alphanumeric());
        if starts && digits > 0 {
            let count = numbers.len();
            result += &numbers.entry(number).or_insert(count).to_string();
        } else {
            result += number;
        }
        rest = next;
    }
    result + rest
}

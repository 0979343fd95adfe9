//! Fields of requests that say how tokens are chosen and where a reply ends.

use crate::error::ApiError;
use crate::fields::Fields;
use crate::options::{STOP_BYTES, STOPS};
use crate::served::Served;
use axum::http::StatusCode;
use lowbit::{GenerationOptions, SampleParams};
use serde_json::{Map, Value};

/// The sampling that a request asks for over the publisher's; `seed` is for one that names none, as
/// a random one.
///
/// # Errors
/// 400 for what makes no sense.
pub(crate) fn options(
    fields: &mut Fields,
    served: &Served,
    seed: u64,
) -> Result<GenerationOptions, ApiError> {
    let defaults = &served.defaults;
    let theirs = defaults.sampling;
    let repetition_penalty = match fields.take("repetition_penalty")? {
        Some(penalty) => Some(penalty),
        None => fields.take("repeat_penalty")?,
    };
    let context = match fields.take("repetition_context")? {
        Some(context) => Some(context),
        None => fields.take::<i64>("repeat_last_n")?.map(|last| usize::try_from(last).unwrap_or(usize::MAX)),
    };
    let sampling = SampleParams {
        temperature: fields.take("temperature")?.unwrap_or(theirs.temperature),
        top_k: top_k(fields)?.unwrap_or(theirs.top_k),
        top_p: fields.take("top_p")?.unwrap_or(theirs.top_p),
        min_p: fields.take("min_p")?.unwrap_or(theirs.min_p),
        repetition_penalty: repetition_penalty.unwrap_or(theirs.repetition_penalty),
        presence_penalty: fields.take("presence_penalty")?.unwrap_or(theirs.presence_penalty),
        frequency_penalty: fields.take("frequency_penalty")?.unwrap_or(theirs.frequency_penalty),
        seed: match fields.take::<i64>("seed")? {
            None => served.seed.unwrap_or(seed),
            // As with the peers, any seed.
            Some(-1) => seed,
            Some(seed) => seed as u64,
        },
    };
    sampling.validate().map_err(|error| {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", format!("sampling: {error}"))
    })?;
    let biases = match biases(fields, served)? {
        Some(biases) => biases,
        None => defaults.logit_bias.clone(),
    };
    let stop_ids = match fields.take("ignore_eos")? {
        Some(true) => vec![],
        _ => served.tokenizer.eos_ids().to_vec(),
    };
    Ok(GenerationOptions::default()
        .with_sampling(sampling)
        .with_max_tokens(defaults.max_tokens)
        .with_repetition_context(context.unwrap_or(defaults.repetition_context))
        .with_logit_bias(biases)
        .with_stop_ids(stop_ids))
}

/// vLLM's and mlx-lm's -1 is llama.cpp's 0: all tokens.
fn top_k(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let Some(top_k) = fields.take::<i64>("top_k")? else { return Ok(None) };
    match usize::try_from(top_k.max(-1) + i64::from(top_k == -1)) {
        Ok(top_k) => Ok(Some(top_k)),
        Err(_) => Err(ApiError::field("top_k", format!("is {top_k}, but a number of tokens is wanted"))),
    }
}

/// The most tokens of a reply under one of these names; -1 is as many as the context holds.
///
/// # Errors
/// 400 for less than `least`.
pub(crate) fn max_tokens(fields: &mut Fields, names: &[&str], least: i64) -> Result<Option<usize>, ApiError> {
    let mut found = None;
    for name in names {
        let Some(tokens) = fields.take::<i64>(name)? else { continue };
        if tokens < least && tokens != -1 {
            let problem = format!("is {tokens}, but at least {least} is wanted, or -1 for no limit");
            return Err(ApiError::field(&fields.path(name), problem));
        }
        found = found.or(Some(usize::try_from(tokens).unwrap_or(usize::MAX)));
    }
    Ok(found)
}

/// Numbers that are added to logits: an object of ids.
fn biases(fields: &mut Fields, served: &Served) -> Result<Option<Vec<(u32, f32)>>, ApiError> {
    const NAME: &str = "logit_bias";
    let Some(biases) = fields.take::<Map<String, Value>>(NAME)? else { return Ok(None) };
    let read = |(id, bias): (&String, &Value)| {
        let wrong = |problem: String| ApiError::field(&format!("{NAME}.{id}"), problem);
        let token = id.trim().parse::<u32>().ok().filter(|&id| (id as usize) < served.vocab_size);
        let token = token.ok_or_else(|| {
            wrong(format!("is no token: ids are 0 to {}", served.vocab_size.saturating_sub(1)))
        })?;
        let bias = bias.as_f64().ok_or_else(|| wrong("must be a number".into()))? as f32;
        if !bias.is_finite() {
            return Err(wrong("is too large".into()));
        }
        Ok((token, bias))
    };
    biases.iter().map(read).collect::<Result<_, _>>().map(Some)
}

/// The texts that end a reply: one, or a list.
///
/// # Errors
/// 400 for too many, or too long ones.
pub(crate) fn stops(fields: &mut Fields, name: &str) -> Result<Vec<String>, ApiError> {
    let path = fields.path(name);
    let stops: Vec<String> = match fields.value(name) {
        None => vec![],
        Some(Value::String(stop)) => vec![stop],
        Some(list) => serde_json::from_value(list)
            .map_err(|_| ApiError::field(&path, "must be a string or a list of strings"))?,
    };
    if stops.len() > STOPS {
        return Err(ApiError::field(&path, format!("has {} texts, but {STOPS} may be", stops.len())));
    }
    match stops.iter().find(|stop| stop.len() > STOP_BYTES) {
        Some(stop) => {
            let problem = format!("has a text of {} bytes, but {STOP_BYTES} may be", stop.len());
            Err(ApiError::field(&path, problem))
        }
        None => Ok(stops),
    }
}

/// The model that a request names, by the name that it is answered with.
///
/// # Errors
/// 404 for one that is not served.
pub(crate) fn model(fields: &mut Fields, served: &Served) -> Result<String, ApiError> {
    match fields.take::<String>("model")? {
        None => Ok(served.name.clone()),
        Some(name) if served.is_named(&name) => Ok(name),
        Some(name) => Err(unknown_model(&name, served)),
    }
}

/// 404 for a model that is not served.
pub(crate) fn unknown_model(name: &str, served: &Served) -> ApiError {
    not_served(name, &[&served.name])
}

/// 404 for a model beside those of these names.
pub(crate) fn not_served(name: &str, names: &[&str]) -> ApiError {
    let hint = if names.len() == 1 { "; --alias gives it further names" } else { "" };
    let message = format!("model {name} is not served here, but {}{hint}", names.join(", "));
    let error = ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message);
    ApiError { param: Some("model".into()), ..error }
}

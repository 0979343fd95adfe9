//! Dynamo's requests as the engine's.

use crate::{INVALID, Running, error};
use dynamo_backend_common::{
    DynamoError, GuidedDecodingOptions, PreprocessedRequest, SamplingOptions, StopConditions,
};
use lowbit::{GenerationOptions, ReplyForm, SampleParams};
use lowbit_engine::Request;
use serde_json::Value;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// A request of the engine's.
pub(crate) struct Asked {
    pub(crate) request: Request,
    /// Ids that are part of the reply, and end it.
    pub(crate) last_ids: Vec<u32>,
}

fn refused(field: &str, problem: impl std::fmt::Display) -> DynamoError {
    error(INVALID, format!("{field}: {problem}"))
}

/// That a field which would change the reply is not used.
fn need_absent(field: &str, is_absent: bool) -> Result<(), DynamoError> {
    if is_absent { Ok(()) } else { Err(refused(field, "is not done here")) }
}

impl Asked {
    /// Reads a request, and compiles the form of its reply.
    ///
    /// # Errors
    /// `InvalidArgument` for a field that would change the reply and is not done here.
    pub(crate) fn read(asked: &PreprocessedRequest, running: &Running) -> Result<Self, DynamoError> {
        check(asked)?;
        let stops = &asked.stop_conditions;
        let mut options = sampling(&asked.sampling_options, &running.defaults)?
            .with_max_tokens(stops.max_tokens.map_or(usize::MAX, |tokens| tokens as usize))
            .with_stop_ids(stop_ids(stops, &asked.eos_token_ids, running.tokenizer.eos_ids()));
        if let Some(guided) = &asked.sampling_options.guided_decoding {
            if let Some(form) = form(guided)? {
                let prompt = Some(asked.token_ids.as_slice());
                let grammar = running.grammars()?.compile(&form, prompt);
                options.grammar = Some(grammar.map_err(|problem| refused("guided_decoding", problem))?);
            }
        }
        let mut request = Request::new(asked.token_ids.to_vec()).with_options(options);
        if let Some(count) = asked.output_options.logprobs {
            request = request.with_logprobs(count as usize);
        }
        if let Some(priority) = asked.routing.as_ref().and_then(|routing| routing.priority) {
            request = request.with_priority(priority);
        }
        let last_ids = match stops.ignore_eos {
            Some(true) => vec![],
            _ => stops.stop_token_ids_visible.clone().unwrap_or_default(),
        };
        Ok(Self { request, last_ids })
    }
}

fn check(asked: &PreprocessedRequest) -> Result<(), DynamoError> {
    let (sampling, stops) = (&asked.sampling_options, &asked.stop_conditions);
    let routing = asked.routing.as_ref();
    let is_one = |count: Option<u8>| count.is_none_or(|count| count == 1);
    // Then there is nothing that could end the reply before.
    let has_no_least = stops.min_tokens.is_none_or(|tokens| tokens == 0) || stops.ignore_eos == Some(true);
    for (field, is_absent) in [
        ("n", is_one(sampling.n)),
        ("best_of", is_one(sampling.best_of)),
        ("use_beam_search", sampling.use_beam_search != Some(true)),
        ("min_tokens", has_no_least),
        ("max_thinking_tokens", stops.max_thinking_tokens.is_none()),
        ("prompt_logprobs", asked.output_options.prompt_logprobs.is_none()),
        ("prompt_embeds", asked.prompt_embeds.is_none()),
        ("multi_modal_data", asked.multi_modal_data.as_ref().is_none_or(|data| data.is_empty())),
        ("prefill_result", asked.prefill_result.is_none()),
        ("bootstrap_info", asked.bootstrap_info.is_none()),
        ("encoder_result", asked.encoder_result.is_none()),
        ("lora_name", routing.is_none_or(|routing| routing.lora_name.is_none())),
        ("cache_salt", routing.is_none_or(|routing| routing.cache_namespace.is_none())),
    ] {
        need_absent(field, is_absent)?;
    }
    check_extra(asked.extra_args.as_ref())
}

/// Checks `extra_args` of the frontend: sampling beyond its own fields, and the bodies of
/// routes that are one engine's. Other entries change no reply here: they name what a response
/// brings besides, or say how the prompt was rendered, which is seen in the prompt itself.
fn check_extra(extra: Option<&Value>) -> Result<(), DynamoError> {
    let Some(Value::Object(extra)) = extra else { return Ok(()) };
    // Text is made of tokens in the frontend.
    let sampling = extra.get("sampling_options").and_then(Value::as_object);
    let unknown = sampling.and_then(|fields| fields.keys().find(|field| *field != "detokenize"));
    need_absent(unknown.map_or("", String::as_str), unknown.is_none())?;
    for field in ["vllm_tito", "sglang_tito"] {
        need_absent(field, !extra.contains_key(field))?;
    }
    Ok(())
}

/// The sampling that is asked for over the publisher's.
fn sampling(asked: &SamplingOptions, defaults: &GenerationOptions) -> Result<GenerationOptions, DynamoError> {
    let theirs = defaults.sampling;
    let top_k = match asked.top_k {
        None => theirs.top_k,
        Some(-1) => 0,
        Some(count) => usize::try_from(count).map_err(|_| refused("top_k", format!("is {count}")))?,
    };
    let params = SampleParams {
        temperature: asked.temperature.unwrap_or(theirs.temperature),
        top_k,
        top_p: asked.top_p.unwrap_or(theirs.top_p),
        min_p: asked.min_p.unwrap_or(theirs.min_p),
        repetition_penalty: asked.repetition_penalty.unwrap_or(theirs.repetition_penalty),
        presence_penalty: asked.presence_penalty.unwrap_or(theirs.presence_penalty),
        frequency_penalty: asked.frequency_penalty.unwrap_or(theirs.frequency_penalty),
        // Each request that names none has another: so are hashers' keys.
        seed: asked.seed.map_or_else(|| RandomState::new().hash_one(0), |seed| seed as u64),
    };
    params.validate().map_err(|problem| refused("sampling_options", problem))?;
    Ok(defaults.clone().with_sampling(params))
}

/// The ids that end a reply and are not part of it.
fn stop_ids(stops: &StopConditions, eos: &[u32], own: &[u32]) -> Vec<u32> {
    if stops.ignore_eos == Some(true) {
        return vec![];
    }
    let mut ids = if eos.is_empty() { own.to_vec() } else { eos.to_vec() };
    let named = [&stops.stop_token_ids, &stops.stop_token_ids_hidden];
    ids.extend(named.into_iter().flatten().flatten());
    // Those that are part of the reply are sent first.
    ids.retain(|id| !stops.stop_token_ids_visible.as_ref().is_some_and(|visible| visible.contains(id)));
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The form of the reply.
fn form(guided: &GuidedDecodingOptions) -> Result<Option<ReplyForm>, DynamoError> {
    need_absent("guided_decoding.structural_tag", guided.structural_tag.is_none())?;
    need_absent("guided_decoding.whitespace_pattern", guided.whitespace_pattern.is_none())?;
    let forms = [
        schema(guided.json.as_ref())?.map(ReplyForm::JsonSchema),
        guided.regex.clone().map(ReplyForm::Regex),
        guided.choice.clone().filter(|texts| !texts.is_empty()).map(ReplyForm::Choice),
        guided.grammar.clone().map(ReplyForm::grammar),
    ];
    let mut forms = forms.into_iter().flatten();
    match (forms.next(), forms.next()) {
        (_, Some(_)) => Err(refused("guided_decoding", "has more than one form")),
        (form, None) => Ok(form),
    }
}

/// A schema, which may be a JSON text.
fn schema(json: Option<&Value>) -> Result<Option<Value>, DynamoError> {
    match json {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => {
            let schema = serde_json::from_str(text);
            schema.map(Some).map_err(|problem| refused("guided_decoding.json", problem))
        }
        Some(schema) => Ok(Some(schema.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dynamo_backend_common::engine::RoutingHints;
    use serde_json::json;

    #[test]
    fn ids_that_end_a_reply_are_in_it_only_where_that_is_asked_for() {
        let mut stops = StopConditions { stop_token_ids_hidden: Some(vec![9, 2]), ..Default::default() };
        assert_eq!(stop_ids(&stops, &[2, 3], &[1]), [2, 3, 9]);
        assert_eq!(stop_ids(&stops, &[], &[1]), [1, 2, 9]);
        stops.stop_token_ids_visible = Some(vec![3]);
        assert_eq!(stop_ids(&stops, &[2, 3], &[1]), [2, 9]);
        stops.ignore_eos = Some(true);
        assert!(stop_ids(&stops, &[2], &[1]).is_empty());
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        let asked = |change: fn(&mut PreprocessedRequest)| {
            let builder = &mut PreprocessedRequest::builder();
            let builder = builder.model("m".into()).token_ids(vec![1]).stop_conditions(Default::default());
            let builder = builder.sampling_options(Default::default()).output_options(Default::default());
            let mut asked = builder.build().expect("a request");
            change(&mut asked);
            check(&asked).map_err(|error| error.to_string())
        };
        assert_eq!(asked(|_| ()), Ok(()));
        // As load generators ask for replies of a length.
        let of_length = |asked: &mut PreprocessedRequest| {
            (asked.stop_conditions.min_tokens, asked.stop_conditions.ignore_eos) = (Some(5), Some(true));
            asked.extra_args = Some(json!({"nvext": {"token_in": true}}));
        };
        assert_eq!(asked(of_length), Ok(()));
        for (change, field) in [
            (|asked: &mut PreprocessedRequest| asked.sampling_options.n = Some(2), "n"),
            (|asked: &mut PreprocessedRequest| asked.stop_conditions.min_tokens = Some(5), "min_tokens"),
            (|asked: &mut PreprocessedRequest| asked.prompt_embeds = Some(String::new()), "prompt_embeds"),
            (
                |asked: &mut PreprocessedRequest| {
                    asked.extra_args = Some(json!({"sampling_options": {"allowed_token_ids": [1]}}));
                },
                "allowed_token_ids",
            ),
            (
                |asked: &mut PreprocessedRequest| {
                    let cache_namespace = Some("mine".into());
                    asked.routing = Some(RoutingHints { cache_namespace, ..Default::default() });
                },
                "cache_salt",
            ),
        ] as [(fn(&mut PreprocessedRequest), &str); 5]
        {
            let error = asked(change).unwrap_err();
            assert!(error.contains(&format!("{field}: is not done here")), "{error}");
        }
        let two = GuidedDecodingOptions {
            regex: Some("a".into()),
            grammar: Some("b".into()),
            ..Default::default()
        };
        assert!(form(&two).is_err());
    }

    #[test]
    fn a_schema_may_be_a_text() {
        let form = |json| form(&GuidedDecodingOptions { json: Some(json), ..Default::default() });
        let object = json!({"type": "object"});
        for json in [object.clone(), json!(object.to_string())] {
            assert!(matches!(form(json), Ok(Some(ReplyForm::JsonSchema(schema))) if schema == object));
        }
        assert!(matches!(form(Value::Null), Ok(None)));
        assert!(form(json!("{")).unwrap_err().to_string().contains("guided_decoding.json: EOF"));
        let no_choice = GuidedDecodingOptions { choice: Some(vec![]), ..Default::default() };
        assert!(matches!(super::form(&no_choice), Ok(None)));
    }

    #[test]
    fn the_publishers_sampling_is_the_default() {
        let params = SampleParams { temperature: 0.6, top_k: 20, ..Default::default() };
        let defaults = GenerationOptions::default().with_sampling(params);
        let asked = SamplingOptions { top_k: Some(-1), seed: Some(-3), ..Default::default() };
        let got = sampling(&asked, &defaults).unwrap().sampling;
        assert_eq!((got.temperature, got.top_k, got.seed), (0.6, 0, -3i64 as u64));
        let wrong = SamplingOptions { temperature: Some(-1.0), ..Default::default() };
        assert!(sampling(&wrong, &defaults).is_err());
    }
}

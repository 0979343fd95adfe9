//! Dynamo's own tests of an engine, and what they do not ask.

use dynamo_backend_common::testing::{mock_context, run_conformance};
use dynamo_backend_common::{
    FinishReason, GenerateContext, GuidedDecodingOptions, LLMEngine, LLMEngineOutput, PreprocessedRequest,
};
use futures::StreamExt;
use lowbit_dynamo::{LowbitEngine, Settings};

fn engine() -> LowbitEngine {
    LowbitEngine::new(Settings {
        model: concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo-4bit").into(),
        served_model_name: None,
        device: "cpu".into(),
        max_running: 8,
        cache_memory: 0.1,
    })
}

/// A request for 16 tokens.
fn request(ids: Vec<u32>) -> PreprocessedRequest {
    let builder = &mut PreprocessedRequest::builder();
    let builder = builder.model("demo".into()).token_ids(ids).stop_conditions(Default::default());
    let builder = builder.sampling_options(Default::default()).output_options(Default::default());
    let mut request = builder.build().expect("a request");
    request.stop_conditions.max_tokens = Some(16);
    request.stop_conditions.ignore_eos = Some(true);
    request.sampling_options.temperature = Some(0.0);
    request
}

async fn reply(engine: &LowbitEngine, request: PreprocessedRequest) -> Vec<LLMEngineOutput> {
    let context = GenerateContext::new(mock_context(), None);
    let stream = engine.generate(request, context).await.expect("it is taken");
    stream.map(|chunk| chunk.expect("no error")).collect().await
}

fn ids(chunks: &[LLMEngineOutput]) -> Vec<u32> {
    chunks.iter().flat_map(|chunk| chunk.token_ids.iter().copied()).collect()
}

#[tokio::test]
async fn dynamos_conformance_kit_passes() {
    run_conformance(engine).await.expect("conformance");
}

#[tokio::test]
async fn replies_are_the_engines() {
    let engine = engine();
    let config = engine.start(1).await.expect("it starts");
    let llm = config.llm.expect("a model of tokens");
    assert_eq!(llm.kv_cache_block_size, Some(64));
    assert!(llm.context_length.is_some() && llm.total_kv_blocks.is_some_and(|blocks| blocks > 0));

    let prompt: Vec<u32> = (100..300).collect();
    let first = reply(&engine, request(prompt.clone())).await;
    let last = first.last().expect("chunks");
    assert!(matches!(last.finish_reason, Some(FinishReason::Length)));
    let used = last.completion_usage.clone().expect("usage");
    assert_eq!((used.prompt_tokens, used.completion_tokens, ids(&first).len()), (200, 16, 16));
    // The second finds the first one's prompt.
    let again = reply(&engine, request(prompt.clone())).await;
    let used = again.last().and_then(|last| last.completion_usage.clone()).expect("usage");
    let cached = used.prompt_tokens_details.and_then(|details| details.cached_tokens);
    assert!(cached.is_some_and(|tokens| tokens >= 128), "{cached:?}");

    // A visible id is the last one of the reply; a hidden one is not in it.
    let written = ids(&first);
    let place = written.iter().position(|id| *id == written[5]).expect("itself");
    let mut visible = request(prompt.clone());
    visible.stop_conditions.ignore_eos = None;
    visible.eos_token_ids = vec![u32::MAX];
    visible.stop_conditions.stop_token_ids_visible = Some(vec![written[5]]);
    let mut hidden = visible.clone();
    hidden.stop_conditions.stop_token_ids_visible = None;
    hidden.stop_conditions.stop_token_ids_hidden = Some(vec![written[5]]);
    assert_eq!(ids(&reply(&engine, visible).await).len(), place + 1);
    let hidden = reply(&engine, hidden).await;
    assert_eq!(ids(&hidden).len(), place);
    assert!(matches!(hidden.last().and_then(|last| last.finish_reason.clone()), Some(FinishReason::Stop)));

    let mut logprobs = request(prompt.clone());
    logprobs.output_options.logprobs = Some(3);
    let chunks = reply(&engine, logprobs).await;
    let top = chunks[0].top_logprobs.as_ref().expect("log-probabilities");
    assert_eq!((top[0].len(), top[0][0].token_id, top[0][0].rank), (3, chunks[0].token_ids[0], 1));

    let mut held = request(prompt);
    held.stop_conditions.ignore_eos = None;
    let choice = Some(vec!["left".into(), "right".into()]);
    held.sampling_options.guided_decoding = Some(GuidedDecodingOptions { choice, ..Default::default() });
    let held = reply(&engine, held).await;
    assert!(matches!(held.last().and_then(|last| last.finish_reason.clone()), Some(FinishReason::Stop)));

    let mut wrong = request(vec![1]);
    wrong.sampling_options.n = Some(2);
    let context = GenerateContext::new(mock_context(), None);
    let error = engine.generate(wrong, context).await.err().expect("it is refused");
    assert!(error.to_string().contains("n: is not done here"), "{error}");
    engine.cleanup().await.expect("it ends");
    let context = GenerateContext::new(mock_context(), None);
    let error = engine.generate(request(vec![1]), context).await.err().expect("it has ended");
    assert!(error.to_string().contains("the engine does not run"), "{error}");
}

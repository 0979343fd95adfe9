//! Dynamo's own tests of an engine, and what they do not ask.

use dynamo_backend_common::testing::{mock_context, run_conformance};
use dynamo_backend_common::{
    AsyncEngineContext, DynamoError, ErrorType, FinishReason, GenerateContext, GuidedDecodingOptions,
    LLMEngine, LLMEngineOutput, PreprocessedRequest,
};
use futures::StreamExt;
use futures::stream::BoxStream;
use lowbit_dynamo::{LowbitEngine, Settings};
use std::sync::Arc;
use std::time::{Duration, Instant};

type Chunks = BoxStream<'static, Result<LLMEngineOutput, DynamoError>>;

fn engine(model: &str, drain_seconds: u64) -> LowbitEngine {
    LowbitEngine::new(Settings {
        model: format!("{}/../models/{model}", env!("CARGO_MANIFEST_DIR")),
        served_model_name: None,
        device: "cpu".into(),
        max_running: 8,
        cache_memory: 0.1,
        drain_seconds,
        chat_template: None,
    })
}

async fn started() -> LowbitEngine {
    let engine = engine("demo-4bit", 60);
    engine.start(1).await.expect("it starts");
    engine
}

/// A greedy request for 16 tokens, whatever they are.
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

fn prompt() -> Vec<u32> {
    (100..300).collect()
}

async fn stream_in(
    engine: &LowbitEngine,
    request: PreprocessedRequest,
    context: &Arc<dyn AsyncEngineContext>,
) -> Result<Chunks, DynamoError> {
    engine.generate(request, GenerateContext::new(context.clone(), None)).await
}

async fn stream(engine: &LowbitEngine, request: PreprocessedRequest) -> Result<Chunks, DynamoError> {
    stream_in(engine, request, &mock_context()).await
}

async fn reply(engine: &LowbitEngine, request: PreprocessedRequest) -> Vec<LLMEngineOutput> {
    let stream = stream(engine, request).await.expect("it is taken");
    stream.map(|chunk| chunk.expect("no error")).collect().await
}

async fn refusal(engine: &LowbitEngine, request: PreprocessedRequest) -> DynamoError {
    stream(engine, request).await.err().expect("it is refused")
}

fn ids(chunks: &[LLMEngineOutput]) -> Vec<u32> {
    chunks.iter().flat_map(|chunk| chunk.token_ids.iter().copied()).collect()
}

fn end(chunks: &[LLMEngineOutput]) -> FinishReason {
    chunks.last().and_then(|last| last.finish_reason.clone()).expect("an end")
}

/// Tokens of the prompt, those of them that were cached, and those of the reply.
fn counts(chunks: &[LLMEngineOutput]) -> (u32, u32, u32) {
    let used = chunks.last().and_then(|last| last.completion_usage.clone()).expect("usage");
    let cached = used.prompt_tokens_details.and_then(|details| details.cached_tokens);
    (used.prompt_tokens, cached.expect("a count"), used.completion_tokens)
}

#[tokio::test]
async fn dynamos_conformance_kit_passes() {
    for model in ["demo", "demo-4bit"] {
        run_conformance(|| engine(model, 60)).await.expect(model);
    }
}

#[tokio::test]
async fn what_is_registered_is_what_the_engine_has() {
    let engine = engine("demo-4bit", 60);
    let config = engine.start(1).await.expect("it starts");
    let llm = config.llm.expect("a model of tokens");
    assert_eq!((llm.kv_cache_block_size, llm.max_num_seqs), (Some(64), Some(8)));
    assert!(llm.context_length.is_some() && llm.total_kv_blocks.is_some_and(|blocks| blocks > 0));
    // The request by which Dynamo sees that a worker is well.
    let payload = engine.health_check_payload().await.expect("no error").expect("a payload");
    let probe: PreprocessedRequest = serde_json::from_value(payload).expect("a request");
    assert_eq!(ids(&reply(&engine, probe).await).len(), 1);
}

#[tokio::test]
async fn replies_are_counted_and_their_prompts_found_again() {
    let engine = started().await;
    let first = reply(&engine, request(prompt())).await;
    assert!(matches!(end(&first), FinishReason::Length));
    assert_eq!((counts(&first), ids(&first).len()), ((200, 0, 16), 16));
    let again = reply(&engine, request(prompt())).await;
    let (_, cached, _) = counts(&again);
    assert!(cached >= 128, "{cached}");
    assert_eq!(ids(&again), ids(&first));
}

#[tokio::test]
async fn a_visible_id_is_the_last_one_and_a_hidden_one_is_left_out() {
    let engine = started().await;
    let written = ids(&reply(&engine, request(prompt())).await);
    let place = written.iter().position(|id| *id == written[5]).expect("itself");
    let mut visible = request(prompt());
    visible.stop_conditions.ignore_eos = None;
    visible.eos_token_ids = vec![u32::MAX];
    let mut hidden = visible.clone();
    visible.stop_conditions.stop_token_ids_visible = Some(vec![written[5]]);
    hidden.stop_conditions.stop_token_ids_hidden = Some(vec![written[5]]);
    for (request, length) in [(visible, place + 1), (hidden, place)] {
        let chunks = reply(&engine, request).await;
        assert_eq!(ids(&chunks), written[..length]);
        assert!(matches!(end(&chunks), FinishReason::Stop));
        let (prompt, _, tokens) = counts(&chunks);
        assert_eq!((prompt, tokens as usize), (200, length));
    }
}

#[tokio::test]
async fn log_probabilities_and_forms_come_as_asked() {
    let engine = started().await;
    let mut logprobs = request(prompt());
    logprobs.output_options.logprobs = Some(3);
    let chunks = reply(&engine, logprobs).await;
    let top = chunks[0].top_logprobs.as_ref().expect("log-probabilities");
    assert_eq!((top[0].len(), top[0][0].token_id, top[0][0].rank), (3, chunks[0].token_ids[0], 1));
    assert_eq!(chunks[0].log_probs.as_deref(), Some(&[top[0][0].logprob][..]));

    let mut held = request(prompt());
    held.stop_conditions.ignore_eos = None;
    let choice = Some(vec!["left".into(), "right".into()]);
    held.sampling_options.guided_decoding = Some(GuidedDecodingOptions { choice, ..Default::default() });
    assert!(matches!(end(&reply(&engine, held).await), FinishReason::Stop));
}

#[tokio::test]
async fn an_abort_ends_a_reply_and_leaves_no_work() {
    let engine = started().await;
    let long = || {
        let mut request = request(prompt());
        request.stop_conditions.max_tokens = Some(30_000);
        request
    };
    for kill in [false, true] {
        let context = mock_context();
        let mut stream = stream_in(&engine, long(), &context).await.expect("it is taken");
        let first = stream.next().await.expect("a chunk").expect("no error");
        assert_eq!(first.token_ids.len(), 1);
        if kill {
            context.kill()
        } else {
            context.stop_generating()
        }
        let rest: Vec<_> = stream.map(|chunk| chunk.expect("no error")).collect().await;
        assert!(matches!(end(&rest), FinishReason::Cancelled));
        assert_eq!(counts(&rest).2, 1);
    }
    // A client that has gone.
    let mut left = stream(&engine, long()).await.expect("it is taken");
    left.next().await.expect("a chunk").expect("no error");
    drop(left);
    // The end of what runs is awaited: 30,000 tokens would take longer.
    let start = Instant::now();
    engine.cleanup().await.expect("it ends");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_worker_that_ends_finishes_what_runs_and_takes_no_more() {
    let engine = Arc::new(started().await);
    let mut running = stream(&engine, request(prompt())).await.expect("it is taken");
    running.next().await.expect("a chunk").expect("no error");
    let (rest, ()) =
        futures::join!(running.map(|chunk| chunk.expect("no error")).collect::<Vec<_>>(), async {
            engine.cleanup().await.expect("it ends");
        });
    assert_eq!((ids(&rest).len(), counts(&rest).2), (15, 16));
    let error = refusal(&engine, request(prompt())).await;
    assert_eq!(error.class(), ErrorType::Unavailable);
    assert_eq!(error.to_string(), "Unavailable: the engine does not run");
}

#[tokio::test]
async fn a_reply_that_takes_too_long_for_the_end_fails() {
    let engine = engine("demo-4bit", 0);
    engine.start(1).await.expect("it starts");
    let mut long = request(prompt());
    long.stop_conditions.max_tokens = Some(30_000);
    let mut running = stream(&engine, long).await.expect("it is taken");
    running.next().await.expect("a chunk").expect("no error");
    engine.cleanup().await.expect("it ends");
    let last = running.collect::<Vec<_>>().await.pop().expect("an end");
    let error = last.expect_err("an error");
    assert_eq!(error.class(), ErrorType::Unavailable);
    assert_eq!(error.to_string(), "Unavailable: the engine is shutting down");
}

#[tokio::test]
async fn a_bad_request_is_refused_with_its_reason() {
    type Change = fn(&mut PreprocessedRequest);
    let engine = started().await;
    let cases: [Change; 6] = [
        |asked| asked.sampling_options.n = Some(2),
        |asked| asked.sampling_options.temperature = Some(-1.0),
        |asked| asked.token_ids = Arc::new(vec![]),
        |asked| asked.token_ids = Arc::new(vec![1 << 20]),
        |asked| asked.token_ids = Arc::new(vec![1; 40_000]),
        |asked| {
            let guided = GuidedDecodingOptions { regex: Some("(".into()), ..Default::default() };
            asked.sampling_options.guided_decoding = Some(guided);
        },
    ];
    let mut reasons = vec![];
    for change in cases {
        let mut asked = request(prompt());
        change(&mut asked);
        let error = refusal(&engine, asked).await;
        assert_eq!(error.class(), ErrorType::InvalidRequest, "{error}");
        // Of the two only this one reaches a client.
        assert_eq!(error.public_message(), Some(error.message()));
        reasons.push(error.message().to_string());
    }
    let expected = [
        "n: is not done here",
        "sampling_options: sample: temperature is -1, but a finite number from 0 is wanted",
        "there are no tokens to start from",
        "token 0 is 1048576, but the vocabulary has 8192",
        "the prompt has 40000 tokens, but a text may have 32768 at most",
        "guided_decoding: regex: at 1(8): invalid regex \"(\" (in regex): regex parse error",
    ];
    assert_eq!(reasons, expected);
}

//! Several models behind one address: loaded when they are asked for, and unloaded for others.

use crate::support::client::{chat, read, read_chunk, read_head};
use crate::support::{QWEN, Running, Script, Scripted, tokenizer};
use lowbit_serve::{Offer, Served};
use serde_json::json;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// A model's loads, and its last engine while that lives.
#[derive(Default)]
struct Loads {
    count: AtomicUsize,
    last: Mutex<Weak<Scripted>>,
}

impl Loads {
    fn is_loaded(&self) -> bool {
        self.last.lock().unwrap().upgrade().is_some()
    }
}

/// A model that says its name, slowly if its name begins with `slow`.
fn offer(name: &'static str) -> (Offer, Arc<Loads>) {
    let loads = Arc::<Loads>::default();
    let of = loads.clone();
    let load = move || {
        of.count.fetch_add(1, Ordering::SeqCst);
        let tokenizer = tokenizer();
        let mut script = Script::new(tokenizer.encode(name, false).unwrap());
        if name.starts_with("slow") {
            let ids = tokenizer.encode(&name.repeat(30), false).unwrap();
            script = Script { pause: Duration::from_millis(100), ..Script::new(ids) };
        }
        if name == "broken" {
            return Err("/secret/path: is damaged".into());
        }
        assert_ne!(name, "panics", "a defect of the loader");
        let engine = Arc::new(Scripted::new(vec![script]));
        *of.last.lock().unwrap() = Arc::downgrade(&engine);
        let template = lowbit::ChatTemplate::new(QWEN, "template".as_ref()).unwrap();
        let served = Served::new(name, tokenizer, Some(template)).with_aliases(vec![format!("{name}/alias")]);
        Ok((served, engine as _))
    };
    (Offer::new(name, Box::new(load)).with_aliases(vec![format!("{name}/alias")]), loads)
}

fn says(server: &Running, model: &str) -> String {
    let answer = server.chat(&json!({"model": model})).ok();
    answer["choices"][0]["message"]["content"].as_str().unwrap().into()
}

fn states(server: &Running) -> Vec<String> {
    let models = server.get("/v1/models").ok();
    models["data"].as_array().unwrap().iter().map(|of| of["state"].as_str().unwrap().into()).collect()
}

#[test]
fn models_are_loaded_when_asked_for_and_unloaded_for_others() {
    let (a, b, c) = (offer("a"), offer("b"), offer("c"));
    let server = Running::offered(vec![a.0, b.0, c.0], 2);
    let loads = [a.1, b.1, c.1];
    let counts = || loads.each_ref().map(|of| of.count.load(Ordering::SeqCst));
    // Each name of each.
    assert_eq!(states(&server), ["unloaded"; 6]);
    assert_eq!(server.get("/health/ready").status, 200);
    assert_eq!((says(&server, "b"), counts()), ("b".into(), [0, 1, 0]));
    assert_eq!(states(&server), ["unloaded", "unloaded", "loaded", "loaded", "unloaded", "unloaded"]);
    // Its other names, as Ollama's clients have them, and in other APIs.
    assert_eq!(says(&server, "b/alias"), "b");
    let body = json!({"model": "b:latest", "messages": [{"role": "user", "content": "x"}], "stream": false});
    assert_eq!(server.post("/api/chat", &body).ok()["message"]["content"], "b");
    assert_eq!(server.message(&json!({"model": "b"})).ok()["content"][0]["text"], "b");
    // A request that names none has the first.
    let answer = server.chat(&json!({})).ok();
    assert_eq!((&answer["model"], counts()), (&json!("a"), [1, 1, 0]));
    assert_eq!(says(&server, "b"), "b");
    // The one that was not used for longest goes, with its engine.
    assert_eq!((says(&server, "c"), counts()), ("c".into(), [1, 1, 1]));
    assert!(!loads[0].is_loaded() && loads[1].is_loaded() && loads[2].is_loaded());
    assert_eq!(says(&server, "a"), "a");
    assert_eq!((loads[1].is_loaded(), counts()), (false, [2, 1, 1]));
    let lines = server.lines.lock().unwrap().join("\n");
    assert!(lines.contains("a: unloaded") && lines.contains("b: unloaded"), "{lines}");
    // Figures are those of the loaded ones.
    let metrics = server.get("/metrics").text();
    for (model, is_there) in [("a", true), ("b", false), ("c", true)] {
        let line = format!("lowbit_requests_running{{model_name=\"{model}\"}} 0");
        assert_eq!(metrics.contains(&line), is_there, "{line}: {metrics}");
    }
    server.stop();
    server.join();
    assert!(loads.iter().all(|of| !of.is_loaded()), "nothing outlives the server");
}

#[test]
fn a_model_that_cannot_be_loaded_fails_alone() {
    let (good, broken, panics) = (offer("good"), offer("broken"), offer("panics"));
    let server = Running::offered(vec![good.0, broken.0, panics.0], 1);
    for name in ["broken", "panics", "broken"] {
        let answer = server.chat(&json!({"model": name}));
        let want = format!("model {name} cannot be loaded; the server's log says why");
        assert_eq!((answer.status, &answer.json()["error"]["message"]), (500, &json!(want)));
    }
    assert_eq!(says(&server, "good"), "good");
    assert_eq!(states(&server), ["loaded", "loaded", "failed", "failed", "failed", "failed"]);
    let lines = server.lines.lock().unwrap().join("\n");
    assert!(lines.contains("error: broken: /secret/path: is damaged"), "{lines}");
    let answer = server.chat(&json!({"model": "other"}));
    assert_eq!(
        (answer.status, &answer.json()["error"]["message"]),
        (404, &json!("model other is not served here, but good, broken, panics"))
    );
    let health = server.get("/health");
    assert_eq!((health.status, &health.json()["models"]["broken"]), (200, &json!("failed")));
}

#[test]
fn a_model_in_use_stays() {
    let ((slow, loads), (other, _)) = (offer("slow and steady"), offer("other"));
    let server = Running::offered(vec![slow, other], 1);
    let body = chat(&json!({"model": "slow and steady", "stream": true})).to_string();
    let mut stream = server.send("POST", "/v1/chat/completions", &[], body.as_bytes());
    assert_eq!(read_head(&mut stream).0, 200);
    read_chunk(&mut stream);
    let answer = server.chat(&json!({"model": "other"}));
    assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")));
    assert_eq!(answer.json()["error"]["code"], "models_busy");
    // The client goes, and the model is free.
    drop(stream);
    let start = Instant::now();
    while server.chat(&json!({"model": "other"})).status != 200 {
        assert!(start.elapsed() < Duration::from_secs(10));
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(!loads.is_loaded());
    // Many that ask at once load it once.
    let before = loads.count.load(Ordering::SeqCst);
    let body = chat(&json!({"model": "slow and steady", "max_tokens": 1})).to_string();
    let asked: Vec<_> =
        (0..8).map(|_| server.send("POST", "/v1/chat/completions", &[], body.as_bytes())).collect();
    asked.into_iter().for_each(|mut asked| assert_eq!(read(&mut asked).status, 200));
    assert_eq!(loads.count.load(Ordering::SeqCst), before + 1);
}

#[test]
fn caches_are_shown_and_dropped() {
    let server = Running::new(Scripted::new(vec![]));
    let model = &server.get("/v1/cache").ok()["models"][0];
    assert_eq!(
        (&model["model"], &model["budget_bytes"], &model["free_bytes"]),
        (&json!("test"), &json!(1 << 20), &json!((1 << 20) - (1 << 18) - (1 << 17)))
    );
    let kept = json!({"bytes": 1 << 17, "state_bytes": 3000, "kv_bytes": (1 << 17) - 3000, "texts": 2});
    assert_eq!(model["kept"], kept);
    assert_eq!(model["running"]["state_bytes"], 2000);
    let dropped = server.request("DELETE", "/v1/cache", &[], b"").ok();
    assert_eq!(dropped["models"], json!([{"model": "test", "texts": 2, "bytes": 300}]));
}

#[test]
fn figures_have_vllms_names_where_they_are_wanted() {
    let server = Running::with(QWEN, Scripted::new(vec![]), |options| {
        options.metric_names = lowbit_serve::MetricNames::Vllm;
    });
    server.says("One moment.");
    let written = server.chat(&json!({})).ok()["usage"]["completion_tokens"].as_u64().unwrap();
    let metrics = server.get("/metrics").text();
    for line in [
        "vllm:num_requests_waiting{model_name=\"test\"} 0.0".to_string(),
        "vllm:num_requests_running{model_name=\"test\"} 0.0".into(),
        "vllm:kv_cache_usage_perc{model_name=\"test\"} 0.25".into(),
        "vllm:cache_config_info{model_name=\"test\",block_size=\"64\",num_gpu_blocks=\"256\"} 1".into(),
        "vllm:time_to_first_token_seconds_count{model_name=\"test\"} 1".into(),
        format!("vllm:inter_token_latency_seconds_count{{model_name=\"test\"}} {}", written - 1),
        "vllm:e2e_request_latency_seconds_count{model_name=\"test\"} 1".into(),
        "vllm:request_queue_time_seconds_count{model_name=\"test\"} 1".into(),
        "vllm:request_success_total{model_name=\"test\",finished_reason=\"stop\"} 1".into(),
        "vllm:prefix_cache_queries_total{model_name=\"test\"} 70".into(),
        "vllm:prefix_cache_hits_total{model_name=\"test\"} 64".into(),
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
    assert!(!metrics.contains("lowbit_requests_running") && metrics.ends_with("# EOF\n"));
}

//! Flags and commands of llama.cpp's programs and of mlx-lm's that lowbit does not have under that
//! name, one by one. `classes.rs` has those that come in kinds.

use super::classes;
use super::drafts::{DRAFT_MAX, DRAFT_MIN, DRAFT_MODEL, spec_type};
use super::instead::Instead::{self, *};
use super::reasons::*;

/// A command of lowbit, or all.
pub type Command = Option<&'static str>;

const GENERATE: Command = Some("generate");
const INSPECT: Command = Some("inspect");
const CHAT: Command = Some("chat");
const PERPLEXITY: Command = Some("perplexity");
const QUANTIZE: Command = Some("quantize");
const BENCH: Command = Some("bench");
const EMBED: Command = Some("embed");

/// The translation of each flag, for one command or all of them. A flag that a command has itself
/// is only looked up for what its value says ([`Instead::Value`]).
const FLAGS: &[(Command, &[&str], Instead)] = &[
    // The model.
    (None, &["-hf", "-hfr"], Is("--hf-repo")),
    (
        None,
        &["-hff", "--hf-file"],
        Say("name a file with its repository: -hf org/name:FILE.gguf, or -hf org/name:Q4_K_M"),
    ),
    (None, &["-hft", "--hf-token"], Say("store the token with `hf auth login`; it is found there")),
    (
        None,
        &["-mu", "--model-url"],
        Value(|url| Some(if is_hub(url) { Is("--hf-repo") } else { Say(DOWNLOAD) })),
    ),
    (None, &["-dr", "--docker-repo"], Say(DOWNLOAD)),
    (None, &["--trust-remote-code", "--insecure"], Nothing(0, "no code of a checkpoint is run")),
    (None, &["--offline"], Nothing(0, "a model that is in the cache is used without the network")),
    (None, &["-mm", "-mmu", "-mmdev"], Say(TEXT_ALONE)),
    (GENERATE, DRAFT_MODEL, Is("--draft-model")),
    (CHAT, DRAFT_MODEL, Is("--draft-model")),
    (None, DRAFT_MODEL, Say(DRAFTS)),
    (GENERATE, DRAFT_MAX, Is("--draft-max")),
    (CHAT, DRAFT_MAX, Is("--draft-max")),
    (None, DRAFT_MAX, Say(DRAFTS)),
    (GENERATE, DRAFT_MIN, Is("--draft-min")),
    (CHAT, DRAFT_MIN, Is("--draft-min")),
    (None, DRAFT_MIN, Say(DRAFTS)),
    (GENERATE, &["--spec-type"], Value(spec_type)),
    (CHAT, &["--spec-type"], Value(spec_type)),
    (None, &["-td", "-tbd", "-Cd", "-Crd", "--draft-model", "--draft-max", "--draft-min"], Say(DRAFTS)),
    (None, &["-Cbd", "-Crbd", "-ctkd", "-ctvd", "-otd", "-cmoed", "-ncmoed", "-devd", "-ngld"], Say(DRAFTS)),
    (GENERATE, &["--mtp"], Means("--speculate", "mtp")),
    (CHAT, &["--mtp"], Means("--speculate", "mtp")),
    (None, &["--mtp"], Say(DRAFTS)),
    (None, &["-lcs", "-lcd", "--dflash", "--eagle3"], Say(DRAFTS)),
    (None, &["--override-kv"], Say("a checkpoint is taken as it says it is")),
    (None, &["--check-tensors"], Nothing(0, "a logit that is NaN or infinite is always an error")),
    (None, &["-cl", "--cache-list"], Say("`hf cache ls` lists the models that are downloaded")),
    (None, &["--spm-infill", "-ag", "--agent", "-no-ag", "--no-agent"], Say(SERVER)),
    (None, &["--server-base", "--skip-download"], Say(SERVER)),
    (None, &["--usage"], Means("--help", "")),
    (
        None,
        &["--completion-bash"],
        Say("there are no completions for shells; `--help` lists a command's flags"),
    ),
    // The device.
    (None, &["--list-devices"], Runs("devices")),
    (None, &["-ngl"], Is("--n-gpu-layers")),
    (None, &["-dev"], Is("--device")),
    (None, &["-sm", "--split-mode"], Unless(&["none", "layer"], ONE_DEVICE)),
    (None, &["-mg", "--main-gpu"], Unless(&["0"], "--device cuda:1 names the second GPU")),
    (None, &["-ts", "-ot", "-cmoe", "-ncmoe", "-ncffn", "-rpc", "--rpc", "--pipeline"], Say(ONE_DEVICE)),
    (None, &["--numa", "-C", "-Cr", "-Cb", "-Crb"], Say(AFFINITY)),
    (None, &["--cpu-strict", "--cpu-strict-batch"], Unless(&["0"], AFFINITY)),
    (None, &["--prio", "--poll"], Nothing(1, "threads wait as the system has them wait")),
    (None, &["-tb", "--threads-batch"], Nothing(1, "prompts use --threads, too")),
    (None, &["-b", "--batch-size", "-ub", "--ubatch-size", "--prefill-step-size"], Nothing(1, CHUNKS)),
    (None, &["-fa", "--flash-attn"], Switch("attention never stores its scores")),
    (None, &["--mlock", "--no-mlock", "--no-mmap", "--mmap", "-dio", "--direct-io"], Nothing(0, MAPPED)),
    (None, &["-ndio", "--no-direct-io"], Nothing(0, MAPPED)),
    (None, &["-mmp", "-lm", "--load-mode", "-lzm", "--lazy-mode"], Nothing(1, MAPPED)),
    (None, &["--warmup", "--no-warmup"], Nothing(0, "kernels are compiled while a model is loaded")),
    (
        None,
        &["--repack", "-nr", "--no-repack", "--no-host"],
        Switch("weights are laid out as the device wants them"),
    ),
    (None, &["--op-offload", "--no-op-offload", "-nopo"], Switch("all of a model is on one device")),
    (None, &["-fit", "--fit"], Switch("a model is on one device, whole")),
    (None, &["-fitt", "-fitc"], Nothing(1, "a model is on one device, whole")),
    (None, &["-fitp"], Say("`lowbit inspect` says what a model takes")),
    (None, &["-bs", "--backend-sampling"], Nothing(0, "on a GPU tokens are drawn there")),
    // Caches.
    (None, &["-nkvo", "--no-kv-offload", "-kvo", "--kv-offload"], Switch("caches are where the weights are")),
    (None, &["-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"], Nothing(0, ONE_CACHE)),
    (
        None,
        &["--kv-unified-per-slot", "-cram", "--cache-ram", "-cms", "--checkpoint-min-step"],
        Nothing(1, ONE_CACHE),
    ),
    (None, &["-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", "--cache-reuse"], Nothing(1, ONE_CACHE)),
    (
        None,
        &["--cache-prompt", "--no-cache-prompt", "--cache-idle-slots", "--no-cache-idle-slots"],
        Nothing(0, ONE_CACHE),
    ),
    (
        None,
        &["-cb", "--cont-batching", "-nocb", "--no-cont-batching"],
        Nothing(0, "one text is written at a time"),
    ),
    (None, &["-np", "--parallel", "-ns", "--sequences"], Unless(&["1", "-1"], SERVER)),
    (None, &["--swa-full"], Nothing(0, "caches hold all tokens")),
    (None, &["-dt", "--defrag-thold"], Nothing(1, "caches have no holes")),
    (None, &["-ctk"], Is("--cache-type-k")),
    (None, &["-ctv"], Is("--cache-type-v")),
    (None, &["--kv-cache-dtype"], Is("--cache-type")),
    (None, &["--kv-bits"], Value(kv_bits)),
    (INSPECT, CACHE_TYPES, Value(|_| Some(Nothing(1, "no cache is made")))),
    (QUANTIZE, CACHE_TYPES, Value(|_| Some(Nothing(1, "no cache is made")))),
    (None, &["-qa", "--quantize-activations"], Say(CACHES)),
    (None, &["--max-kv-size"], Say("--ctx-size limits the context; a cache that forgets is not offered")),
    (None, &["--keep"], Nothing(1, "nothing is shifted out of a context")),
    (CHAT, &["--context-shift"], Means("--context-overflow", "drop")),
    (None, &["--context-shift"], Say("a context that is full ends the text; --ctx-size limits it")),
    (None, &["--no-context-shift"], Nothing(0, "a context that is full always ends the text")),
    (None, &["-gan", "-gaw"], Say(ROPE)),
    (None, &["--prompt-cache"], Say(PROMPT_CACHE)),
    // Prompts.
    (None, &["-sys"], Is("--system-prompt")),
    (None, &["-sysf", "--system-prompt-file"], Say("--system-prompt \"$(cat FILE)\"")),
    (GENERATE, INTERACTIVE, Say("`lowbit chat` talks with the model")),
    (CHAT, INTERACTIVE, Nothing(0, "chat always is")),
    (None, &["-mli", "--multiline-input"], Nothing(0, "a line that ends in \\ goes on in the next")),
    (GENERATE, &["--chat-template-config", "--chat-template-args"], Is("--chat-template-kwargs")),
    (CHAT, &["--chat-template-config", "--chat-template-args"], Is("--chat-template-kwargs")),
    (GENERATE, &["-no-cnv", "--no-conversation"], Is("--ignore-chat-template")),
    (CHAT, &["-no-cnv", "--no-conversation", "-st", "--single-turn"], Say("`lowbit generate` answers once")),
    (GENERATE, &["-st", "--single-turn"], Nothing(0, "generate always answers once")),
    (
        CHAT,
        &["-p", "--prompt", "-f", "--file"],
        Say("`lowbit generate` takes one prompt; `lowbit chat` reads messages from standard input"),
    ),
    (GENERATE, &["--no-escape"], Undoes(&["-e", "--escape"], "a prompt is taken as it is without --escape")),
    (CHAT, &["-e", "--escape", "--no-escape"], Nothing(0, "messages are taken as they are typed")),
    (
        None,
        &["--jinja", "--no-jinja", "--use-default-chat-template"],
        Nothing(0, "a checkpoint's own template is used"),
    ),
    (None, &["--apply-chat-template"], Nothing(0, "a checkpoint's own template is used")),
    (GENERATE, &["--no-apply-chat-template"], Is("--ignore-chat-template")),
    (
        CHAT,
        &["--ignore-chat-template"],
        Say("`lowbit generate --ignore-chat-template` takes a prompt as plain text"),
    ),
    (None, &["--prefill-response", "--prefill-assistant", "--no-prefill-assistant"], Say(PREFILL)),
    (
        None,
        &["--in-prefix", "--in-suffix", "--in-prefix-bos"],
        Say("--chat-template FILE has what stands around messages"),
    ),
    (None, &["-rea", "--reasoning"], Value(reasoning)),
    (None, &["--think"], Value(reasoning)),
    (None, &["--reasoning-budget"], Value(budget)),
    (None, &["--reasoning-budget-message"], Say(BUDGET)),
    (None, &["--reasoning-effort"], Say("--chat-template-kwargs '{\"reasoning_effort\": \"low\"}'")),
    (None, &["--reasoning-format"], Nothing(1, "a reply is printed whole, with its reasoning")),
    (
        None,
        &["--reasoning-preserve", "--no-reasoning-preserve"],
        Nothing(0, "the template keeps or drops reasoning"),
    ),
    (
        None,
        &["--skip-chat-parsing", "--no-skip-chat-parsing", "--hidethinking"],
        Nothing(0, "a reply is printed whole"),
    ),
    (
        None,
        &["--no-display-prompt", "--display-prompt", "--verbose-prompt"],
        Nothing(0, "the prompt is not printed; --json has its tokens"),
    ),
    (None, &["-bf", "--binary-file"], Say("--file takes text in UTF-8")),
    // The text that is written.
    (CHAT, &["--ignore-eos"], Say("`lowbit generate --ignore-eos` writes on")),
    (None, &["--predict"], Is("--max-tokens")),
    (None, &["-r", "--reverse-prompt", "--extra-eos-token", "--eos-token"], Is("--stop")),
    (None, &["--n-probs"], Is("--logprobs")),
    (None, &["-sp"], Is("--special")),
    (
        None,
        &["--xtc-probability", "--dry-multiplier", "--mirostat", "--dynatemp-range"],
        Unless(&["0"], SAMPLERS),
    ),
    (None, &["--typical", "--typical-p"], Unless(&["1"], SAMPLERS)),
    (None, &["--top-nsigma", "--top-n-sigma", "--adaptive-target"], Unless(&["-1"], SAMPLERS)),
    (None, &["--min-tokens-to-keep"], Unless(&["1"], SAMPLERS)),
    (None, &["-l", "--logit-bias"], Say(SAMPLERS)),
    (None, &["--presence-penalty", "--frequency-penalty"], Unless(&["0"], SAMPLERS)),
    (GENERATE, &["-j", "-jf", "--json-schema-file"], Is("--json-schema")),
    (CHAT, &["-j", "-jf", "--json-schema-file"], Is("--json-schema")),
    (GENERATE, &["--grammar-file"], Is("--grammar")),
    (CHAT, &["--grammar-file"], Is("--grammar")),
    (None, &["--grammar", "-j", "-jf"], Say(GRAMMAR)),
    (GENERATE, &["-o", "--output", "--output-file"], Say("`> FILE` keeps what is written")),
    (CHAT, &["-o", "--output", "--output-file"], Say("`| tee FILE` keeps what is written")),
    (GENERATE, &["--format"], Say("--json prints the reply as JSON")),
    (CHAT, &["--format"], Say("--json prints each reply as JSON")),
    (
        None,
        &["--no-perf", "--perf", "--simple-io", "--show-timings", "--no-show-timings", "--nowordwrap"],
        Nothing(0, PLAIN),
    ),
    (None, &["-ptc", "--print-token-count"], Nothing(1, PLAIN)),
    (None, &["-v"], Nothing(0, "there is no log")),
    (
        None,
        &["-lv", "--verbosity", "--log-file", "--log-verbosity", "--log-prompts-dir", "--log-level"],
        Nothing(1, "there is no log"),
    ),
    (None, &["--verbose", "-co", "--color"], Switch("there is no log, and no colour")),
    // A server.
    (None, &["--host", "--port", "--reuse-port", "--path", "-a", "--alias", "--tags", "-sps"], Say(SERVER)),
    (None, &["--allowed-origins", "--decode-concurrency", "--prompt-concurrency"], Say(SERVER)),
    (None, &["--props", "--metrics", "-to", "--timeout", "--sleep-idle-seconds", "--keepalive"], Say(SERVER)),
    (None, &["--pooling", "-embd"], Say(EMBEDDINGS)),
    (None, &["--attention"], Unless(&["causal"], "models attend to what is before a token")),
    // embed.
    (EMBED, &["--pooling"], Value(pooling)),
    (EMBED, &["-embd", "--embedding", "--embeddings"], Nothing(0, "that is what `lowbit embed` does")),
    (EMBED, &["--embd-normalize", "--embd-norm"], Value(embd_normalize)),
    (EMBED, &["--embd-output-format"], Value(embd_output_format)),
    (
        EMBED,
        &["--embd-separator"],
        Unless(&["\n", "\\n"], "give each text as an argument, or a line of --file"),
    ),
    (EMBED, &["--truncate-dim"], Is("--dimensions")),
    // bench.
    (BENCH, &["-p", "--n-prompt"], Is("--prompt-tokens")),
    (BENCH, &["-n", "--n-gen", "-g", "--generation-tokens"], Is("--generated-tokens")),
    (BENCH, &["-d", "--n-depth"], Is("--depth")),
    (BENCH, &["-r", "--repetitions", "--num-trials"], Is("--runs")),
    (BENCH, &["-pg"], Say("a prompt and a reply are timed apart: -p 4 -n 2")),
    (BENCH, &["-t", "--threads"], Value(one_number)),
    (BENCH, &["-o", "--output"], Value(bench_output)),
    (BENCH, &["-oe", "--output-err"], Say("--json prints the figures as JSON on standard output")),
    (BENCH, &["--delay"], Nothing(1, "runs follow each other at once")),
    (BENCH, &["--progress"], Nothing(0, "each case is printed when it is timed")),
    (BENCH, &["-npp", "-ntg"], Say("-p 4 is a prompt's length, -n 2 a reply's")),
    (BENCH, &["-npl"], Is("--batch")),
    (BENCH, &["-pps", "-tgs"], Say("each prompt is read alone")),
    // perplexity.
    (PERPLEXITY, &["--sequence-length"], Is("--context")),
    (
        PERPLEXITY,
        &["--kl-divergence", "--kl-divergence-base", "--save-all-logits", "--logits-file"],
        Say(TEACHER),
    ),
    (PERPLEXITY, &["--chunks"], Unless(&["-1"], WHOLE_FILE)),
    (PERPLEXITY, &["--num-samples"], Unless(&["-1"], WHOLE_FILE)),
    (PERPLEXITY, &["--ppl-stride"], Unless(&["0"], "windows do not overlap; --context is their length")),
    (PERPLEXITY, &["--ppl-output-type"], Unless(&["0"], "--json prints the figures as JSON")),
    (PERPLEXITY, &["--data-path"], Say("--file FILE names the text")),
    (PERPLEXITY, &["-s", "--seed"], Nothing(1, NOT_DRAWN)),
    (
        PERPLEXITY,
        &["--temp", "--temperature", "--top-k", "--top-p", "--min-p", "-n", "--n-predict", "--predict"],
        Nothing(1, NOT_DRAWN),
    ),
    (PERPLEXITY, &["--repeat-penalty", "--repeat-last-n"], Nothing(1, NOT_DRAWN)),
    (
        PERPLEXITY,
        &["--ignore-eos", "-e", "--escape", "--no-escape"],
        Nothing(0, "the file is scored as it is"),
    ),
    (PERPLEXITY, &["-p", "--prompt"], Say("--file FILE names the text")),
    (PERPLEXITY, &["--hellaswag", "--hellaswag-tasks", "--winogrande", "--winogrande-tasks"], Say(TASKS)),
    (PERPLEXITY, &["--multiple-choice", "--multiple-choice-tasks", "--tasks"], Say(TASKS)),
    // quantize, after mlx-lm.
    (QUANTIZE, &["--hf-path"], Is("--model")),
    (QUANTIZE, &["--mlx-path", "--save-path", "--outfile", "--output-file", "--gguf-path"], Is("--output")),
    (QUANTIZE, &["-q", "--quantize"], Nothing(0, "quantize always does")),
    (QUANTIZE, &["-d", "--dequantize"], Say("--format F16, BF16 or F32 writes GGUF with decoded weights")),
    (QUANTIZE, &["--upload-repo"], Say("upload the output with `hf upload`")),
    (QUANTIZE, &["--export-gguf"], Say("--format Q4_K_M writes GGUF, or another of llama.cpp's types")),
    (
        QUANTIZE,
        &["--quant-predicate"],
        Say("--rule 'down_proj=6' gives some tensors another format, and --target-bpw each its own"),
    ),
    (
        QUANTIZE,
        &["--quantized-model"],
        Say("learning begins with the source rounded anew: --bits and --group-size say how"),
    ),
    (QUANTIZE, &["--num-samples", "--max-steps"], Say("--steps and --windows say how much is learned from")),
    (QUANTIZE, &["--max-seq-length", "--sequence-length"], Is("--context")),
    (QUANTIZE, &["--learning-rate", "-lr"], Is("--rate")),
    (QUANTIZE, &["--batch-size"], Is("--windows")),
    (QUANTIZE, &["--data-path", "--dataset"], Say("--data FILE names a text, or a .jsonl file")),
    (
        QUANTIZE,
        &["--grad-checkpoint"],
        Nothing(0, "what a gradient needs is computed again where memory asks for it"),
    ),
    (QUANTIZE, &["--target-dir"], Say("--targets FILE keeps what the source says of each token")),
    (QUANTIZE, &["--targets-only"], Say("--targets FILE is made first, and learning goes on with it")),
    (QUANTIZE, &["--embed-bits"], With("--rule", "embed_tokens=")),
    (QUANTIZE, &["--embed-group-size"], Say("all tensors have groups of --group-size")),
    (
        QUANTIZE,
        &["--n-grid", "--fallback-bits", "--fallback-group-size", "--sensitivities", "--report-ppl"],
        Say(LEARN),
    ),
    (QUANTIZE, &["--accumulation-dtype"], Say(LEARN)),
    (
        QUANTIZE,
        &["--low-bits", "--high-bits", "--low-group-size", "--high-group-size"],
        Say("--target-bpw takes 2 to 8 bits for each weight"),
    ),
    // quantize, after llama.cpp.
    (QUANTIZE, &["--outtype"], Is("--format")),
    (QUANTIZE, &["--allow-requantize"], Nothing(0, "a source that is quantised is always decoded first")),
    (QUANTIZE, &["--tensor-type"], Value(tensor_type)),
    (
        QUANTIZE,
        &["--tensor-type-file"],
        Say("--rule 'ffn_down=Q6_K' gives some tensors another type; it may be given several times"),
    ),
    (QUANTIZE, &["--token-embedding-type"], With("--rule", "token_embd=")),
    (QUANTIZE, &["--output-tensor-type", "--leave-output-tensor"], Say(OUTPUT_TENSOR)),
    (QUANTIZE, &["--pure"], Say("--rule '*=Q4_K' gives all tensors one type")),
    (QUANTIZE, &["--prune-layers"], Say("a model keeps its layers")),
    (
        QUANTIZE,
        &["--keep-split", "--split-max-size", "--split-max-tensors", "--split"],
        Say("a GGUF file is written whole; llama-gguf-split cuts it"),
    ),
    (QUANTIZE, &["--max-buffer-size"], Nothing(1, "tensors are read from the mapped file")),
    (
        QUANTIZE,
        &["-ofreq", "--output-format", "--process-output", "--show-statistics", "--parse-special"],
        Say(IMATRIX),
    ),
    (QUANTIZE, &["--in-file", "--chunk", "--from-chunk", "--chunks", "--ppl", "--no-ppl"], Say(IMATRIX)),
    (
        QUANTIZE,
        &["--use-temp-file", "--no-lazy", "--verbose"],
        Nothing(0, "tensors are read from the mapped file"),
    ),
    (
        QUANTIZE,
        &["--bigendian", "--vocab-only", "--model-name", "--metadata", "--remote", "--mistral-format"],
        Say("the output says what the source says"),
    ),
];

const CACHE_TYPES: &[&str] =
    &["-ctk", "-ctv", "--cache-type", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype", "--kv-bits"];
/// llama.cpp's names of the model that guesses, and of the numbers of guesses.
const INTERACTIVE: &[&str] =
    &["-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first", "-ins", "--instruct"];

const DOWNLOAD: &str = "download the file, and name it with --model";
const PREFILL: &str = "put the beginning of the answer into a prompt with --ignore-chat-template";
const TEACHER: &str = "--compare TEACHER runs both models side by side, without a file of logits";
const TASKS: &str = "perplexity scores texts alone; --compare TEACHER measures what a quantisation changed";
const NOT_DRAWN: &str = "nothing is drawn: the whole file is scored";
const WHOLE_FILE: &str = "the whole file is scored; name a shorter one";
const LEARN: &str = "--learn scales --data TEXT learns what rounding lost, and --target-bpw shares out bits";
const OUTPUT_TENSOR: &str = "--rule 'output.weight=Q8_0' names its type; a rule before it, such as 'attn_output=Q4_K', keeps what it would also name";
const CHUNKS: &str = "prompts are read in chunks that suit the device";
const MAPPED: &str = "on the CPU weights stay in the mapped file, or are repacked from it";
const ONE_CACHE: &str = "a conversation has one cache, which holds all of it";
const PLAIN: &str = "standard output has the text alone; figures go to standard error";
const BUDGET: &str = "reasoning is as long as the model makes it; 0 turns it off";

/// True if a URL is on the hub, which knows it as a model's.
fn is_hub(url: &str) -> bool {
    ["://huggingface.co/", "://www.huggingface.co/", "://hf.co/"].iter().any(|host| url.contains(host))
}

/// Thinking on and off, as most templates call it.
/// llama.cpp's kinds of speculation.
fn reasoning(value: &str) -> Option<Instead> {
    match value {
        "on" | "true" => Some(Means("--chat-template-kwargs", "{\"enable_thinking\": true}")),
        "off" | "false" => Some(Means("--chat-template-kwargs", "{\"enable_thinking\": false}")),
        "auto" => Some(Nothing(1, "the template says whether the model thinks")),
        "high" | "medium" | "low" => Some(Say("--chat-template-kwargs '{\"reasoning_effort\": \"low\"}'")),
        _ => None,
    }
}

fn budget(value: &str) -> Option<Instead> {
    match value {
        "0" => reasoning("off"),
        "-1" => Some(Nothing(1, "reasoning is as long as the model makes it")),
        _ => Some(Say(BUDGET)),
    }
}

/// mlx-lm's bits of cached keys and values.
fn kv_bits(value: &str) -> Option<Instead> {
    match value {
        "8" => Some(Means("--cache-type", "q8_0")),
        _ => Some(Say(CACHES)),
    }
}

fn one_number(value: &str) -> Option<Instead> {
    value.contains(',').then_some(Say("one number of threads is timed at a time; --scaling times several"))
}

fn bench_output(value: &str) -> Option<Instead> {
    Some(match value {
        "json" | "jsonl" => Means("--json", ""),
        "md" => Nothing(1, "a table is printed unless --json is given"),
        _ => Say("--json prints the figures as JSON"),
    })
}

/// llama-quantize's patterns are regular expressions; those that are plain text mean the same here.
fn tensor_type(value: &str) -> Option<Instead> {
    match value.rsplit_once('=') {
        Some((pattern, _)) if pattern.contains(['(', '[', '|', '+', '?', '\\', '^', '$', '{', '*']) => {
            Some(Say("--rule PATTERN=TYPE has * for any text, and no regular expressions"))
        }
        _ => Some(Is("--rule")),
    }
}

/// The poolings of llama.cpp that are none of ours.
fn pooling(value: &str) -> Option<Instead> {
    match value {
        "none" => Some(Say("lowbit embed makes one embedding of each text: mean, cls or last")),
        "rank" => Some(Say("lowbit embed makes embeddings, and scores no documents")),
        _ => None,
    }
}

fn embd_normalize(value: &str) -> Option<Instead> {
    Some(match value {
        "-1" => Means("--no-normalize", ""),
        "2" => Means("--normalize", ""),
        _ => Say("embeddings are divided by their length (2), or left as they come (-1)"),
    })
}

fn embd_output_format(value: &str) -> Option<Instead> {
    Some(match value {
        "" | "raw" => Means("--format", "text"),
        "array" => Means("--format", "array"),
        "json" => Means("--json", ""),
        _ => Say("--json prints an object per text, and --similarity the cosines"),
    })
}

/// All single flags.
pub fn flags() -> impl Iterator<Item = &'static (Command, &'static [&'static str], Instead)> {
    #[cfg(feature = "serve")]
    let of_server = super::server::FLAGS;
    #[cfg(not(feature = "serve"))]
    let of_server = &[];
    FLAGS.iter().chain(of_server)
}

/// The translation of `flag` of `command`: as a single flag of the command, as one of all commands,
/// or by its class.
pub fn instead(command: &str, flag: &str) -> Option<Instead> {
    let single = |wanted: Command| {
        let found = flags().find(|(of, names, _)| *of == wanted && names.contains(&flag));
        found.map(|(_, _, instead)| *instead)
    };
    let command = flags().find_map(|(of, ..)| of.filter(|of| *of == command));
    command
        .and_then(|command| single(Some(command)))
        .or_else(|| single(None))
        .or_else(|| classes::instead(flag))
}

/// Commands of other programs. An empty name is `generate` where there is a prompt, else `chat`.
pub const COMMANDS: &[(&[&str], Instead)] = &[
    (&["run", "cli", "talk"], Is("")),
    (&["complete", "completion"], Is("generate")),
    (&["ppl"], Is("perplexity")),
    (&["convert", "dwq", "awq", "gptq", "dynamic_quant", "quant"], Is("quantize")),
    (&["benchmark"], Is("bench")),
    (&["show", "info"], Is("inspect")),
    #[cfg(feature = "serve")]
    (&["server"], Is("serve")),
    #[cfg(not(feature = "serve"))]
    (&["serve", "server"], Say("this program was built without the feature `serve`")),
    (&["imatrix"], Say(IMATRIX)),
    (&["evaluate", "lm_eval"], Say(TASKS)),
    (&["lora", "fuse"], Say(ADAPTERS)),
    (&["cache_prompt"], Say(PROMPT_CACHE)),
    (&["embedding", "embeddings"], Is("embed")),
    (&["tts", "mtmd-cli"], Say(NO_TEXT)),
    (&["gguf-split"], Say("GGUF files are read split or whole, and written whole")),
    (
        &["pull", "download"],
        Say("a model is downloaded when it is first used: lowbit inspect --model org/name"),
    ),
    (&["list", "ls", "manage"], Say("`hf cache ls` lists the models that are downloaded")),
    (&["rm"], Say("`hf cache rm` removes a model that was downloaded")),
];

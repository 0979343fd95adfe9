//! Flags of llama.cpp's programs and of mlx-lm's that lowbit does not have under that name.

use super::Instead::{self, *};

/// A command of lowbit, or all.
type Command = Option<&'static str>;

/// What a flag is answered with, for one command or all of them. Flags that lowbit has are not here.
pub const FLAGS: &[(Command, &[&str], Instead)] = &[
    // Which model.
    (None, &["-hf", "-hfr"], Is("--hf-repo")),
    (None, &["-hff", "--hf-file"], Say("name a quantisation with its repository: -hf org/name:Q4_K_M")),
    (None, &["-hft", "--hf-token"], Say("store the token with `hf auth login`; it is found there")),
    (
        None,
        &["-mu", "--model-url", "-dr", "--docker-repo"],
        Say("download the file, and name it with --model"),
    ),
    (None, &["--trust-remote-code"], Nothing(0, "no code of a checkpoint is run")),
    (None, &["--offline"], Nothing(0, "a model that is in the cache is used without the network")),
    (None, &["--lora", "--lora-scaled", "--adapter-path"], Say(ADAPTERS)),
    (
        None,
        &["-mm", "--mmproj", "-mmu", "--mmproj-url", "--image", "--audio"],
        Say("lowbit reads text alone"),
    ),
    (None, &["-md", "--model-draft", "-hfd", "--hf-repo-draft", "--draft-model"], Say(DRAFTS)),
    (None, &["--draft", "--draft-max", "--draft-min", "--num-draft-tokens"], Say(DRAFTS)),
    (None, &["--override-kv"], Say("a checkpoint is taken as it says it is")),
    // Where it runs.
    (None, &["-ngl"], Is("--n-gpu-layers")),
    (None, &["-dev"], Is("--device")),
    (None, &["--list-devices"], Say("`lowbit generate --help` lists under --device what this build has")),
    (None, &["-sm", "--split-mode", "-ts", "--tensor-split", "-mg", "--main-gpu"], Say(ONE_DEVICE)),
    (None, &["-ot", "--override-tensor", "-cmoe", "--cpu-moe", "-ncmoe", "--n-cpu-moe"], Say(ONE_DEVICE)),
    (
        None,
        &["--numa", "--cpu-mask", "--cpu-range", "--cpu-strict"],
        Say("start lowbit with numactl or taskset"),
    ),
    (None, &["--prio", "--poll"], Nothing(1, "threads wait as the system has them wait")),
    (None, &["-tb", "--threads-batch"], Nothing(1, "prompts use --threads, too")),
    (
        None,
        &["-b", "--batch-size", "-ub", "--ubatch-size"],
        Nothing(1, "prompts are read in chunks that suit the device"),
    ),
    (None, &["--prefill-step-size"], Nothing(1, "prompts are read in chunks that suit the device")),
    (None, &["-fa", "--flash-attn"], Switch("attention never stores its scores")),
    (
        None,
        &["--mlock", "--no-mmap", "--mmap", "-dio", "--direct-io"],
        Nothing(0, "on the CPU weights stay in the mapped file"),
    ),
    (
        None,
        &["--warmup", "--no-warmup", "--no-repack", "--no-op-offload"],
        Nothing(0, "there is nothing to switch"),
    ),
    (
        None,
        &["-nkvo", "--no-kv-offload", "-kvo", "--kv-offload"],
        Nothing(0, "caches are where the weights are"),
    ),
    (None, &["-ctk", "--cache-type-k", "-ctv", "--cache-type-v"], Say(CACHES)),
    (
        None,
        &["--kv-bits", "--kv-group-size", "--quantized-kv-start", "-qa", "--quantize-activations"],
        Say(CACHES),
    ),
    (None, &["--max-kv-size"], Say("--ctx-size limits the context; a cache that forgets is not offered")),
    (None, &["--keep", "--context-shift"], Say("a context that is full ends the text; --ctx-size limits it")),
    (None, &["--no-context-shift"], Nothing(0, "a context that is full always ends the text")),
    (None, &["--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"], Say(ROPE)),
    (
        None,
        &[
            "--yarn-orig-ctx",
            "--yarn-ext-factor",
            "--yarn-attn-factor",
            "--yarn-beta-slow",
            "--yarn-beta-fast",
        ],
        Say(ROPE),
    ),
    (
        None,
        &["--prompt-cache", "--prompt-cache-file", "--prompt-cache-all", "--prompt-cache-ro"],
        Say("prompts are not kept in files; `lowbit chat` keeps a conversation's"),
    ),
    // Prompts.
    (None, &["-sys"], Is("--system-prompt")),
    (None, &["-sysf", "--system-prompt-file"], Say("--system-prompt \"$(cat FILE)\"")),
    (
        Some("generate"),
        &[
            "-cnv",
            "--conversation",
            "-i",
            "--interactive",
            "-if",
            "--interactive-first",
            "-ins",
            "--instruct",
        ],
        Say("`lowbit chat` talks with the model"),
    ),
    (
        Some("chat"),
        &[
            "-cnv",
            "--conversation",
            "-i",
            "--interactive",
            "-if",
            "--interactive-first",
            "-ins",
            "--instruct",
        ],
        Nothing(0, "chat always is"),
    ),
    (Some("generate"), &["--chat-template-config"], Is("--chat-template-kwargs")),
    (Some("chat"), &["--chat-template-config"], Is("--chat-template-kwargs")),
    (Some("generate"), &["-no-cnv", "--no-conversation"], Is("--ignore-chat-template")),
    (
        Some("chat"),
        &["-no-cnv", "--no-conversation", "-st", "--single-turn"],
        Say("`lowbit generate` answers once"),
    ),
    (Some("generate"), &["-st", "--single-turn"], Nothing(0, "generate always answers once")),
    (
        Some("chat"),
        &["-p", "--prompt", "-f", "--file"],
        Say("`lowbit generate` takes one prompt; `lowbit chat` reads messages from standard input"),
    ),
    (None, &["--no-escape"], Nothing(0, "a prompt is taken as it is without --escape")),
    (None, &["--jinja", "--use-default-chat-template"], Nothing(0, "a checkpoint's own template is used")),
    (
        None,
        &["--prefill-response"],
        Say("put the beginning of the answer into a prompt with --ignore-chat-template"),
    ),
    (
        None,
        &["--no-display-prompt", "--display-prompt", "--verbose-prompt"],
        Nothing(0, "the prompt is not printed; --json has its tokens"),
    ),
    (None, &["-bf", "--binary-file"], Say("--file takes text in UTF-8")),
    // What is written.
    (None, &["--predict"], Is("--max-tokens")),
    (Some("bench"), &["-r", "--repetitions"], Is("--runs")),
    (None, &["-r", "--reverse-prompt", "--extra-eos-token", "--eos-token"], Is("--stop")),
    (None, &["--n-probs"], Is("--logprobs")),
    (
        None,
        &["--xtc-probability", "--xtc-threshold", "--min-tokens-to-keep", "--typical", "--top-nsigma"],
        Say(SAMPLERS),
    ),
    (
        None,
        &["--mirostat", "--mirostat-lr", "--mirostat-ent", "--dynatemp-range", "--dynatemp-exp"],
        Say(SAMPLERS),
    ),
    (
        None,
        &[
            "--dry-multiplier",
            "--dry-base",
            "--dry-allowed-length",
            "--dry-penalty-last-n",
            "--dry-sequence-breaker",
        ],
        Say(SAMPLERS),
    ),
    (None, &["--samplers", "--sampler-seq", "--sampling-seq", "-l", "--logit-bias"], Say(SAMPLERS)),
    (None, &["--presence-penalty", "--frequency-penalty"], Say(SAMPLERS)),
    (
        None,
        &["--grammar", "--grammar-file", "-j", "--json-schema", "-jf", "--json-schema-file"],
        Say("what is written cannot be held to a grammar; --json prints the reply as JSON"),
    ),
    (
        None,
        &["--log-disable", "--no-perf", "--perf", "--simple-io", "--no-show-timings"],
        Nothing(0, "standard output has the text alone; figures go to standard error"),
    ),
    (None, &["-v", "--log-verbose"], Nothing(0, "there is no log")),
    (None, &["-lv", "--verbosity", "--log-file", "--log-verbosity"], Nothing(1, "there is no log")),
    (None, &["--verbose", "-co", "--color"], Switch("there is no log, and no colour")),
    (None, &["--host", "--port", "--api-key", "-np", "--parallel"], Say("lowbit has no server")),
    // Other commands.
    (Some("bench"), &["-p"], Is("--prompt-tokens")),
    (Some("bench"), &["-n"], Is("--generated-tokens")),
    (Some("bench"), &["-d", "--n-depth"], Is("--depth")),
    (Some("quantize"), &["--hf-path"], Is("--model")),
    (Some("quantize"), &["--mlx-path"], Is("--output")),
    (Some("quantize"), &["-q", "--quantize"], Nothing(0, "quantize always does")),
    (Some("quantize"), &["--dequantize"], Say("--format F16, BF16 or F32 writes GGUF with decoded weights")),
    (Some("quantize"), &["--upload-repo"], Say("upload the output with `hf upload`")),
    (
        Some("quantize"),
        &["--quant-predicate", "--tensor-type"],
        Say("--rule 'down_proj=6' gives some tensors another format"),
    ),
    (Some("perplexity"), &["--kl-divergence", "--kl-divergence-base"], Say(TEACHER)),
    (Some("perplexity"), &["--chunks", "--ppl-stride"], Say("the whole file is scored; name a shorter one")),
];

const ADAPTERS: &str =
    "adapters are not applied while a model runs: merge it first (peft's merge_and_unload, or mlx_lm.fuse)";
const TEACHER: &str = "--compare TEACHER runs both models side by side, without a file of logits";
const DRAFTS: &str = "there is no speculative decoding";
const ONE_DEVICE: &str =
    "a model is on one device, which --device names; CUDA_VISIBLE_DEVICES says which GPU is the first";
const CACHES: &str =
    "caches have the type of the activations, which --dtype names; --ctx-size limits their length";
const ROPE: &str = "positions are computed as the checkpoint says";
const SAMPLERS: &str = "tokens are drawn by --temp, --top-k, --top-p, --min-p and --repetition-penalty";

/// Commands of other programs.
pub const COMMANDS: &[(&[&str], Instead)] = &[
    (&["run", "cli", "talk", "llama-cli", "mlx_lm.chat"], Is("chat")),
    (&["complete", "completion", "llama-completion", "mlx_lm.generate"], Is("generate")),
    (&["ppl", "llama-perplexity", "mlx_lm.perplexity"], Is("perplexity")),
    (&["convert", "mlx_lm.convert", "llama-quantize"], Is("quantize")),
    (&["llama-bench", "mlx_lm.benchmark"], Is("bench")),
    (&["show", "info"], Is("inspect")),
    (&["serve", "server", "llama-server", "mlx_lm.server"], Say("lowbit has no server")),
    (
        &["pull", "download"],
        Say("a model is downloaded when it is first used: lowbit inspect --model org/name"),
    ),
    (&["list", "ls"], Say("`hf cache ls` lists the models that are downloaded")),
];

//! Answers that several flags have.

pub const ADAPTERS: &str =
    "adapters are not applied while a model runs: merge it first (peft's merge_and_unload, or mlx_lm.fuse)";
pub const TEXT_ALONE: &str = "lowbit reads text alone";
pub const NO_TEXT: &str = "lowbit writes text and makes embeddings; it makes no images or speech";
pub const EMBEDDINGS: &str = "`lowbit embed -m MODEL TEXT ..` makes embeddings";
pub const DRAFTS: &str = "generate and chat have --speculate ngram, --speculate mtp and --draft-model MODEL, which run as the \
    model does; --draft-max and --draft-min limit their guesses; serve has --speculate and --draft-max";
pub const ONE_DEVICE: &str = "a model is on one device, whole, which --device names";
pub const AFFINITY: &str = "start lowbit with numactl or taskset";
pub const CACHES: &str = "keys and values are cached in one type, which --cache-type names (8 bits are q8_0); --ctx-size limits their length";
pub const ROPE: &str = "positions are computed as the checkpoint says";
pub const SAMPLERS: &str = "tokens are drawn by --temp, --top-k, --top-p, --min-p, --repetition-penalty, \
    --presence-penalty, --frequency-penalty and --logit-bias";
pub const GRAMMAR: &str =
    "generate and chat hold replies to --json-schema, --grammar or --regex; a server's requests name theirs";
pub const PROMPT_CACHE: &str = "prompts are not kept in files; `lowbit chat` keeps a conversation's";
pub const SERVER: &str = "that is a server's: `lowbit serve` is one";
pub const IMATRIX: &str =
    "importance matrices are not used: --learn scales --data TEXT learns what rounding lost";

"""Random checkpoints with legal options, and what transformers and lowbit make of them."""

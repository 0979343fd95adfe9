"""llama.cpp's library through llama-cpp-python: token ids and logits of a GGUF file.

LLAMA_CPP_LIB_PATH names the folder of a libllama.so built elsewhere, as llama-cpp-python reads it.
"""

from pathlib import Path

import llama_cpp
import numpy as np

F32 = 0


class Model:
    """One thread, f32 caches, no flash attention, no repacked weights."""

    def __init__(self, path: Path, context: int = 512, vocab_only: bool = False):
        defaults = llama_cpp.llama_cpp.llama_model_default_params

        def without_repacking():
            parameters = defaults()
            parameters.use_extra_bufts = False
            return parameters

        llama_cpp.llama_cpp.llama_model_default_params = without_repacking
        try:
            self.model = llama_cpp.Llama(
                str(path),
                n_ctx=context,
                n_batch=context,
                n_threads=1,
                n_threads_batch=1,
                logits_all=True,
                type_k=F32,
                type_v=F32,
                flash_attn=False,
                vocab_only=vocab_only,
                verbose=False,
            )
        finally:
            llama_cpp.llama_cpp.llama_model_default_params = defaults

    def tokenize(self, text: bytes, special: bool) -> np.ndarray:
        return np.asarray(self.model.tokenize(text, add_bos=False, special=special), dtype=np.int64)

    def adds_bos(self) -> bool:
        return bool(llama_cpp.llama_vocab_get_add_bos(self.model._model.vocab))

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """[T, vocabulary], from one batch."""
        self.model.reset()
        self.model.eval([int(token) for token in tokens])
        return np.array(self.model.scores[: len(tokens)])

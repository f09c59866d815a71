"""llama.cpp's cache in its formats, with flash attention, by the C functions that llama-cpp-python binds.

The model is a GGUF file with the bits of its bfloat16 weights (see ``gguf_form.py``). A prompt is given in batches of
``BATCH`` tokens, llama.cpp's own default. The context is as large as the task, rounded up to 256 tokens by llama.cpp,
and so is the cache, which is allocated as a whole.

Filling: the first tokens of the prompt are computed, and the rows that they left are repeated at all positions.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from contract import WARM_UP, WARM_UP_NEW, Answer, Task, peak_rss, serve
from gguf_form import form_of
from llama_cpp_state import stretched
from numpy.typing import NDArray
from token_times import timed

FORMATS = {"f16": llama_cpp.GGML_TYPE_F16, "q8_0": llama_cpp.GGML_TYPE_Q8_0, "q4_0": llama_cpp.GGML_TYPE_Q4_0}
BYTES = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}
"""Of a value: quantised ones have a 16-bit scale for every 32."""
WEIGHTS = "bf16"
BATCH = 512
ERROR = 4
INSTRUCTIONS = re.compile(r"(AVX2|AVX512|AVX512_BF16|AMX_INT8|NEON|SVE) = 1")


def run(task: Task) -> Answer:
    if task.setting not in FORMATS:
        raise ValueError(f"setting {task.setting!r} is none of {', '.join(FORMATS)}")
    with log() as lines, context(task, lines) as opened:
        sequence = Sequence(opened)
        short = Task(task.model, task.prompt[:WARM_UP], WARM_UP_NEW, task.setting, task.threads)
        timed(short, lambda: sequence.feed(short.prompt), lambda token: sequence.feed([token]))
        if task.filled:
            sequence.fill(len(task.prompt))
            times = timed(task, lambda: sequence.feed(task.prompt[-1:]), lambda token: sequence.feed([token]))
        else:
            sequence.clear()
            times = timed(task, lambda: sequence.feed(task.prompt), lambda token: sequence.feed([token]))
        return Answer(
            first_token_s=None if task.filled else times.first,
            decode_tokens_per_s=times.rate,
            peak_rss_bytes=None if task.filled else peak_rss(),
            cache_bytes=sequence.nbytes(BYTES[task.setting]),
            tokens=times.tokens,
            version=version(),
            cache_bytes_from="computed from the allocated tokens, heads and bytes of a value",
        )


def version() -> str:
    """llama-cpp-python's, and the instructions that its library was compiled for."""
    system = llama_cpp.llama_print_system_info().decode()
    return f"{llama_cpp.__version__} ({', '.join(INSTRUCTIONS.findall(system)) or 'no wide instructions'})"


@contextlib.contextmanager
def log() -> Iterator[list[str]]:
    """Errors that llama.cpp logs, instead of all that it has to say on the error stream."""
    lines: list[str] = []

    @llama_cpp.llama_log_callback
    def keep(level: int, text: bytes, _: Any) -> None:
        if level == ERROR:
            lines.append(text.decode(errors="replace").strip())

    llama_cpp.llama_log_set(keep, ctypes.c_void_p(0))
    yield lines


@contextlib.contextmanager
def context(task: Task, errors: list[str]) -> Iterator[Any]:
    """An open context of the task's model."""
    llama_cpp.llama_backend_init()
    options = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(form_of(Path(task.model), WEIGHTS)).encode(), options)
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {Path(task.model).name}: {' '.join(errors[-1:])}")
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = len(task.prompt) + task.new_tokens
    params.n_batch = params.n_ubatch = BATCH
    params.n_threads = params.n_threads_batch = task.threads
    params.type_k = params.type_v = FORMATS[task.setting]
    params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
    opened = llama_cpp.llama_init_from_model(model, params)
    if not opened:
        raise RuntimeError(f"llama.cpp cannot open a context of {params.n_ctx} tokens: {' '.join(errors[-1:])}")
    try:
        yield opened
    finally:
        llama_cpp.llama_free(opened)
        llama_cpp.llama_model_free(model)


class Sequence:
    """The one sequence in a context."""

    def __init__(self, opened: Any) -> None:
        self.context = opened
        self.model = llama_cpp.llama_get_model(opened)
        self.memory = llama_cpp.llama_get_memory(opened)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def feed(self, tokens: list[int]) -> int:
        """Take in tokens behind those that are there; the likeliest next one."""
        for start in range(0, len(tokens), BATCH):
            part = tokens[start : start + BATCH]
            ids = (llama_cpp.llama_token * len(part))(*part)
            status = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(ids, len(part)))
            if status:
                raise RuntimeError(f"llama_decode ended with status {status}")
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self.memory, True)

    def nbytes(self, value: float) -> int:
        """Bytes of keys and values for all tokens of the context, ``value`` bytes each."""
        layers, heads = llama_cpp.llama_model_n_layer(self.model), llama_cpp.llama_model_n_head_kv(self.model)
        dim = llama_cpp.llama_model_n_embd(self.model) // llama_cpp.llama_model_n_head(self.model)
        return round(2 * llama_cpp.llama_n_ctx(self.context) * layers * heads * dim * value)

    def fill(self, tokens: int) -> None:
        """Have the sequence hold ``tokens`` tokens: the rows of those it has, again and again."""
        size = llama_cpp.llama_state_seq_get_size(self.context, 0)
        state = np.empty(size, np.uint8)
        llama_cpp.llama_state_seq_get_data(self.context, pointer(state), size, 0)
        longer = stretched(state, tokens)
        if llama_cpp.llama_state_seq_set_data(self.context, pointer(longer), longer.size, 0) != longer.size:
            raise RuntimeError("llama.cpp does not take the filled cache")


def pointer(data: NDArray[np.uint8]) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


if __name__ == "__main__":
    raise SystemExit(serve(run))

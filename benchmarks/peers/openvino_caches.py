"""OpenVINO GenAI's paged cache in its formats, with and without its cache eviction.

Inference in bfloat16, which is what OpenVINO chooses itself on a CPU with AMX; weights in the model's own format.
Eviction keeps an eighth of the prompt (whole blocks of 32 tokens, three at least) by the attention of the last 32
queries, as SnapKV does, and goes on evicting while it decodes. Evicted blocks stay allocated, for other sequences.

One thread dies with SIGFPE in this version, so two are used whatever the task says. The cache cannot be filled without
computing a prompt: where the task asks for that, the prompt is computed all the same, and its time told.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from contract import WARM_UP, WARM_UP_NEW, Answer, Task, peak_rss, serve
from openvino_form import form_of
from token_times import timed

EVICTING = "-evict-8x"
"""The ending of a setting with cache eviction."""
SHARE = 0.125
FORMATS = ("bf16", "u8", "u4")
SETTINGS = tuple(name + ending for name in FORMATS for ending in ("", EVICTING))
BLOCK = 32
"""Tokens of a block of the cache on a CPU."""
WINDOW = 32
LEAST_THREADS = 2
CHUNK = 1024
"""Tokens of a prompt that are computed at once."""


def run(task: Task) -> Answer:
    if task.setting not in SETTINGS:
        raise ValueError(f"setting {task.setting!r} is none of {', '.join(SETTINGS)}")
    blocks = math.ceil((len(task.prompt) + task.new_tokens) / BLOCK)
    pipeline = pipeline_of(task, blocks)
    short = Task(task.model, task.prompt[:WARM_UP], WARM_UP_NEW, task.setting, task.threads)
    Generation(pipeline, short, blocks).run()
    generation = Generation(pipeline, task, blocks)
    times = generation.run()
    return Answer(
        first_token_s=times.first,
        decode_tokens_per_s=times.rate,
        peak_rss_bytes=peak_rss(),
        cache_bytes=generation.held,
        tokens=times.tokens,
        version=openvino_genai.__version__,
        cache_bytes_from="the pipeline's metrics: its blocks' bytes times the share in use",
    )


def pipeline_of(task: Task, blocks: int) -> Any:
    """The pipeline with a cache of so many blocks."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_seqs = 1
    scheduler.max_num_batched_tokens = CHUNK
    scheduler.num_kv_blocks = blocks
    if task.setting.endswith(EVICTING):
        scheduler.use_cache_eviction = True
        scheduler.cache_eviction_config = openvino_genai.CacheEvictionConfig(
            start_size=BLOCK,
            recent_size=BLOCK,
            max_cache_size=max(3 * BLOCK, int(len(task.prompt) * SHARE) // BLOCK * BLOCK),
            aggregation_mode=openvino_genai.AggregationMode.NORM_SUM,
            snapkv_window_size=WINDOW,
        )
    properties = {
        "INFERENCE_NUM_THREADS": max(LEAST_THREADS, task.threads),
        "INFERENCE_PRECISION_HINT": "bf16",
        "KV_CACHE_PRECISION": task.setting.removesuffix(EVICTING),
    }
    return openvino_genai.ContinuousBatchingPipeline(str(form_of(Path(task.model))), scheduler, "CPU", properties)


class Generation:
    """One sequence in a pipeline, a token at a time.

    Attributes:
        held: bytes of the blocks in use before the last token ended the sequence; None: not known yet.
    """

    def __init__(self, pipeline: Any, task: Task, blocks: int) -> None:
        self.pipeline, self.task, self.blocks = pipeline, task, blocks
        self.held: int | None = None

    def run(self) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = self.task.new_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([self.task.prompt], np.int64))
        self.handle = self.pipeline.add_request(0, ids, config)
        times = timed(self.task, self._next, lambda before: self._next())
        if self.pipeline.has_non_finished_requests():  # the time for decoding was over before
            self.handle.stop()
            self.pipeline.step()  # gives the blocks back
        return times

    def _next(self) -> int:
        """The next token; a step computes a chunk of the prompt, or one token."""
        while not self.handle.can_read():
            if not self.pipeline.has_non_finished_requests():
                raise RuntimeError("the pipeline ended the sequence before its last token")
            self.pipeline.step()
        [output] = self.handle.read().values()
        [token] = output.generated_ids
        self.held = self._held()
        return int(token)

    def _held(self) -> int:
        metrics = self.pipeline.get_metrics()
        in_use = round(metrics.cache_usage / 100 * self.blocks)
        # The pipeline counts a value of four bits as a byte.
        share = 0.5 if self.task.setting.startswith("u4") else 1.0
        return round(metrics.cache_size_in_bytes * share) // self.blocks * in_use


if __name__ == "__main__":
    raise SystemExit(serve(run))

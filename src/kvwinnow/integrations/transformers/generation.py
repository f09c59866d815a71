"""What a call of ``generate`` asks of the cache, and whether it is served; refused before anything is computed."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

from kvwinnow.errors import CacheStateError, KvwinnowError
from kvwinnow.integrations.transformers.calls import NewTokens, Seen

SERVED = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
CHUNKS_GO_ON = "5.24"
"""From this transformers on, ``prefill_chunk_size`` feeds a used cache its new tokens; before, the old ones again."""


@dataclass(frozen=True)
class Generation:
    """One call of ``generate``.

    Attributes:
        rows: which of the cache's rows each row goes on with; None: as they are.
        end: columns of the prompt where ``generate`` feeds it in chunks; None: in one piece.
        before: what the cache had seen.
        copies: how many rows ``generate`` makes of each.
    """

    rows: tuple[int, ...] | None
    end: int | None
    before: Seen
    copies: int

    def offsets(self) -> tuple[int, ...] | None:
        """For each row of the input, how far M-RoPE's positions run from the count of tokens."""
        return (self.before if self.rows is None else self.before.select(self.rows[:: self.copies])).offsets

    def totals(self, seen: Seen, new: NewTokens) -> tuple[int, ...] | None:
        """For each row, tokens once the prompt is complete; None: these columns are no chunk of it.

        Args:
            seen: the cache's content before the chunk.
            new: the chunk.

        Raises:
            KvwinnowError: the prompt ends with padding.
        """
        columns = seen.columns + new.columns
        if self.end is None or columns > self.end:
            return None
        if columns == self.end and new.columns in new.starts:
            _refuse_right_padding(new.starts.index(new.columns))
        before = (self.before if self.rows is None else self.before.select(self.rows)).row_tokens(new.batch)
        after = (old + n for old, n in zip(seen.row_tokens(new.batch), new.tokens, strict=True))
        # Padding lies before a row's first new token. Until that comes nobody can tell how much of it is left, and
        # the row has nothing to lose.
        return tuple(now + (self.end - columns if now > old else 0) for now, old in zip(after, before, strict=True))


def plan(seen: Seen, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generation:
    """Check a call of ``generate``.

    Args:
        seen: the cache's content.
        model: the model called.
        args: positional arguments of ``generate``.
        kwargs: its keyword arguments.

    Raises:
        KvwinnowError: assisted generation, contrastive search and their like; a further cache; chunks that this
            transformers would cut wrongly.
        CacheStateError: the input does not begin with what the cache has seen.
    """
    config = _config(model, args, kwargs)
    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    if mode not in SERVED:
        raise KvwinnowError(
            f"CompressedCache does not support {mode.value.replace('_', ' ')}; use greedy search, sampling or beam "
            "search (no assistant model or prompt lookup, no penalty_alpha, dola_layers, beam groups or constraints)"
        )
    if isinstance(kwargs.get("custom_generate"), str):
        raise KvwinnowError(
            f"custom_generate={kwargs['custom_generate']!r} replaces generate by code that CompressedCache cannot "
            "check; leave it out, or give a function that decodes by forward calls"
        )
    if config.cache_implementation is not None:
        raise KvwinnowError(
            f"cache_implementation={config.cache_implementation!r} asks generate for a cache of its own beside the "
            "CompressedCache; leave one of them out (model.generation_config may carry it)"
        )
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.numel() and not mask[:, -1].all():
        _refuse_right_padding(int(mask[:, -1].to(torch.int64).argmin()))
    inputs = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    copies = max(config.num_beams or 1, config.num_return_sequences or 1)
    rows = seen.rows_that_go_on(inputs, copies) if isinstance(inputs, Tensor) and inputs.ndim == 2 else None
    size = config.prefill_chunk_size
    if size is None:
        return Generation(rows, None, seen, copies)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise KvwinnowError(f"prefill_chunk_size={size!r} must be a whole number, 1 token or more, or left out")
    if seen.columns and Version(transformers.__version__) < Version(CHUNKS_GO_ON):
        raise CacheStateError(
            f"this cache holds {seen.columns} tokens, and generate(prefill_chunk_size={size}) of transformers "
            f"{transformers.__version__} would feed them again; leave it out, or feed the chunks inside "
            "`with cache.prompt(length=n):`"
        )
    if kwargs.get("inputs_embeds") is not None:
        raise KvwinnowError(
            f"prefill_chunk_size={size} cannot cut inputs_embeds; leave it out, or feed the chunks inside "
            "`with cache.prompt(length=n):`"
        )
    return Generation(rows, inputs.shape[1] if isinstance(inputs, Tensor) else 1, seen, copies)


def _refuse_right_padding(row: int) -> NoReturn:
    raise KvwinnowError(
        f"the attention_mask hides the last token of row {row}, which generate goes on from; pad on the left "
        "(tokenizer.padding_side = 'left')"
    )


def _config(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GenerationConfig:
    """The settings ``generate`` will use: the arguments over the config given over the model's."""
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    config: Any = copy.deepcopy(model.generation_config or GenerationConfig())  # type: ignore[no-untyped-call]
    changes = {} if given is None else given.to_diff_dict()
    for name, value in {**changes, **kwargs}.items():
        if hasattr(config, name) and value is not None:
            setattr(config, name, value)
    return config  # type: ignore[no-any-return]

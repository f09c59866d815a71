"""What a call brings to the cache, and whether the cache can serve it; refusals come before anything is changed."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode

from kvwinnow.errors import CacheStateError, KvwinnowError
from kvwinnow.integrations.transformers.structure import Structure


@dataclass(frozen=True)
class NewTokens:
    """The new columns of one forward call.

    Attributes:
        columns: number of columns n, padding included.
        starts: for each row, the column of its first new token; n: the row has none.
    """

    columns: int
    starts: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.starts)

    @property
    def tokens(self) -> tuple[int, ...]:
        """For each row, how many of the columns are tokens."""
        return tuple(self.columns - start for start in self.starts)

    def positions(self, seen: Seen, device: torch.device) -> Tensor:
        """(B, n) int32: each column's index among its row's tokens, -1 = padding."""
        firsts = [old - start for old, start in zip(seen.row_tokens(self.batch), self.starts, strict=True)]
        columns = torch.arange(self.columns, dtype=torch.int32, device=device)
        positions = columns + torch.tensor(firsts, dtype=torch.int32, device=device).unsqueeze(1)
        if any(self.starts):
            starts = torch.tensor(self.starts, dtype=torch.int32, device=device).unsqueeze(1)
            positions.masked_fill_(columns < starts, -1)
        return positions


@dataclass(frozen=True)
class Seen:
    """What a cache has been given so far.

    Attributes:
        columns: columns, padding included.
        tokens: for each row, tokens without padding; empty before the first call.
        digests: for each row, a running hash of its token ids; None once ids were not known (inputs_embeds).
        ended: whether the last prompt is known to be complete, since a token was decoded or ``generate`` called anew.
    """

    columns: int = 0
    tokens: tuple[int, ...] = ()
    digests: tuple[Any, ...] | None = ()
    ended: bool = False

    def row_tokens(self, batch: int) -> tuple[int, ...]:
        """``tokens``, with zeros before the first call."""
        return self.tokens or (0,) * batch

    def after(self, new: NewTokens, ids: Tensor | None, *, decoding: bool) -> Seen:
        """The state after a call."""
        tokens = tuple(old + n for old, n in zip(self.row_tokens(new.batch), new.tokens, strict=True))
        digests = self.digests
        if ids is None or digests is None:
            digests = None
        else:
            digests = tuple(
                _hashed(row, earlier) for row, earlier in zip(ids, digests or (None,) * new.batch, strict=True)
            )
        return Seen(self.columns + new.columns, tokens, digests, decoding)

    def check_continues(self, ids: Tensor) -> None:
        """Check that ``ids`` (B, N), as given to ``generate``, begin with everything this cache has seen.

        Raises:
            CacheStateError: they are another prompt, another batch, or the new tokens alone.
        """
        if not self.columns or self.digests is None:
            return
        rows, batch = ids.shape[0], len(self.tokens)
        if rows == 0 or batch % rows:
            raise CacheStateError(
                f"this cache holds a batch of {batch} rows and {rows} are given; call cache.reset() first"
            )
        begun = ids[:, : self.columns].repeat_interleave(batch // rows, 0)
        same = all(
            _hashed(row, None).digest() == digest.digest() for row, digest in zip(begun, self.digests, strict=True)
        )
        if same and ids.shape[1] == self.columns:
            raise CacheStateError(
                f"this cache has seen all {self.columns} tokens given; add at least one to go on, or call "
                "cache.reset() to begin anew"
            )
        if ids.shape[1] < self.columns or not same:
            raise CacheStateError(
                f"this cache holds a prompt of {self.columns} tokens that the {ids.shape[1]} given ones do not begin "
                "with; call cache.reset() before another prompt, or give the whole conversation to continue it"
            )


def _hashed(ids: Tensor, earlier: Any) -> Any:
    hashed = hashlib.blake2b(digest_size=16) if earlier is None else earlier.copy()
    hashed.update(ids.to("cpu", torch.int64).contiguous().numpy().tobytes())
    return hashed


def check_call(
    seen: Seen, structure: Structure, decoder: nn.Module, given: dict[str, Any], declared: tuple[int, ...] | None
) -> NewTokens:
    """Check one forward call's arguments against the cache's content.

    Args:
        seen: the cache's content.
        structure: the model's.
        decoder: the module called.
        given: its arguments by name.
        declared: tokens of the prompt being fed, as the user declared them; None: nothing was declared.

    Raises:
        CacheStateError: the cache's content does not allow the call.
        KvwinnowError: the call itself cannot be served.
    """
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    inputs = ids if ids is not None else embeds
    if inputs is None:
        raise KvwinnowError("neither input_ids nor inputs_embeds is given; give one of them with the cache")
    if inputs.ndim != (3 if ids is None else 2):
        raise KvwinnowError(
            f"the input has shape {tuple(inputs.shape)}; input_ids must be (rows, tokens) and inputs_embeds "
            "(rows, tokens, hidden size): a single prompt is one row, ids.unsqueeze(0)"
        )
    batch, columns = inputs.shape[:2]
    if columns == 0:
        raise KvwinnowError("the call brings no new token; give at least one beside those the cache has seen")
    if seen.tokens and batch != len(seen.tokens):
        raise CacheStateError(
            f"this cache holds a batch of {len(seen.tokens)} rows and {batch} are given; call cache.reset() before "
            "another batch"
        )
    if decoder.training:
        raise KvwinnowError(
            "the model is in training mode, and CompressedCache is for inference only; call model.eval()"
        )
    if given.get("output_attentions") or getattr(decoder.config, "output_attentions", False):
        raise KvwinnowError(
            "output_attentions=True asks for weights that CompressedCache never holds as a whole; leave it out"
        )
    if given.get("use_cache") is False:
        raise KvwinnowError("use_cache=False contradicts giving a cache; leave one of them out")
    new = NewTokens(columns, _starts(given.get("attention_mask"), seen, batch, columns))
    if declared is not None and len(declared) == 1 and batch > 1 and any(new.starts):
        raise KvwinnowError(
            f"prompt(length={declared[0]}) gives one length, and this batch is padded; give one length per row"
        )
    if columns > 1:
        _check_positions(given.get("position_ids"), seen, new)
        check_trained_length(structure, max(old + n for old, n in zip(seen.row_tokens(batch), new.tokens, strict=True)))
    return new


def check_trained_length(structure: Structure, tokens: int) -> None:
    """Refuse a prompt that ends beyond the positions the model was trained to.

    Raises:
        KvwinnowError: ``tokens`` are more than the trained length.
    """
    if structure.trained_length is not None and tokens > structure.trained_length:
        raise KvwinnowError(
            f"the prompt reaches {tokens:,} tokens, and the model was trained to {structure.trained_length:,} "
            "(max_position_embeddings); shorten it, or use a model with a longer context"
        )


def _starts(mask: Any, seen: Seen, batch: int, columns: int) -> tuple[int, ...]:
    """For each row, the first new column that the attention mask does not hide."""
    if mask is None:
        return (0,) * batch
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        shown = f"{mask.ndim}-dimensional" if isinstance(mask, Tensor) else type(mask).__name__
        raise KvwinnowError(f"the attention_mask is {shown}; CompressedCache takes a 2-dimensional one (rows, tokens)")
    total = seen.columns + columns
    if mask.shape != (batch, total):
        raise KvwinnowError(
            f"the attention_mask has shape {tuple(mask.shape)} and must cover the {seen.columns} columns the cache has "
            f"seen and the {columns} new ones: ({batch}, {total})"
        )
    cached = tuple(mask[:, : seen.columns].to(torch.bool).sum(1).tolist())
    if cached != seen.row_tokens(batch):
        raise CacheStateError(
            f"the attention_mask shows {list(cached)} of the tokens seen per row, which are {list(seen.tokens)}; a "
            "cached token can be evicted but not hidden, so begin with the mask that the prompt was given with"
        )
    visible = mask[:, -columns:].to("cpu", torch.bool)
    starts = columns - visible.sum(1)
    if not torch.equal(visible, torch.arange(columns, device="cpu") >= starts.unsqueeze(1)):
        raise KvwinnowError(
            "the attention_mask hides tokens after the first visible one of a row; pad on the left "
            "(tokenizer.padding_side = 'left')"
        )
    return tuple(starts.tolist())


def _check_positions(position_ids: Any, seen: Seen, new: NewTokens) -> None:
    """Positions given beside a prompt must go on where the cache stands: they tell a new prompt from a further turn."""
    if isinstance(position_ids, Tensor) and position_ids.ndim == 3:
        # M-RoPE counts images in height and width; where there are four rows, the first is the tokens' own count.
        position_ids = position_ids[0] if position_ids.shape[0] == 4 else None
    if not isinstance(position_ids, Tensor) or position_ids.shape[-1] != new.columns:
        return
    rows = position_ids.reshape(-1, new.columns).expand(new.batch, -1).to("cpu", torch.int64)
    for row, start, tokens in zip(rows, new.starts, seen.row_tokens(new.batch), strict=True):
        if start == new.columns:
            continue
        first = int(row[start])
        if not torch.equal(row[start:], torch.arange(first, first + new.columns - start, device="cpu")):
            raise KvwinnowError("the position_ids of a row's new tokens must count up by one; leave them out if unsure")
        if seen.columns and first not in (tokens, seen.columns + start):
            raise CacheStateError(
                f"the position_ids begin at {first} and this cache holds {tokens} tokens of that row; call "
                f"cache.reset() before another prompt, or continue at {tokens}"
            )


def check_generation(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], *, share: bool) -> None:
    """Refuse ways to generate that the cache does not serve, before the prompt is computed.

    Args:
        model: the model.
        args: positional arguments of ``generate``.
        kwargs: its keyword arguments.
        share: whether the budget is a share of the prompt.

    Raises:
        KvwinnowError: beam search, assisted generation, contrastive search and their like; a share of a prompt that
            ``generate`` would cut into chunks.
    """
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    config: Any = copy.deepcopy(model.generation_config or GenerationConfig())  # type: ignore[no-untyped-call]
    changes = {} if given is None else given.to_diff_dict()
    for name, value in {**changes, **kwargs}.items():
        if hasattr(config, name) and value is not None:
            setattr(config, name, value)
    if share and config.prefill_chunk_size is not None:
        raise KvwinnowError(
            f"prefill_chunk_size={config.prefill_chunk_size} cuts the prompt into chunks, and the budget is a share "
            "of a prompt whose length no chunk knows; give the budget in tokens, or leave prefill_chunk_size out"
        )
    mode = config.get_generation_mode(kwargs.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise KvwinnowError(
            f"CompressedCache does not support {mode.value.replace('_', ' ')} yet; use greedy search or sampling "
            "(num_beams=1, no assistant model, no penalty_alpha)"
        )

"""What a call brings to the cache, and whether the cache can serve it; refusals come before anything is changed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvwinnow.errors import CacheStateError, KvwinnowError
from kvwinnow.integrations.transformers.structure import Structure

DIGEST = 16
"""Bytes of a running hash of token ids."""


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
        digests: for each row, a running hash of its token ids, 16 bytes; None once ids were not known (inputs_embeds).
        ended: whether the last prompt is known to be complete, since a token was decoded or ``generate`` called anew.
        offsets: for each row, how far M-RoPE's positions run from the count of tokens; None: they do not.
    """

    columns: int = 0
    tokens: tuple[int, ...] = ()
    digests: tuple[bytes, ...] | None = ()
    ended: bool = False
    offsets: tuple[int, ...] | None = None

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
                _hashed(row, earlier) for row, earlier in zip(ids, digests or (b"",) * new.batch, strict=True)
            )
        return Seen(self.columns + new.columns, tokens, digests, decoding, self.offsets)

    def select(self, rows: Sequence[int]) -> Seen:
        """The state in which row r is what row ``rows[r]`` was."""
        digests = None if self.digests is None else tuple(self.digests[row] for row in rows)
        offsets = None if self.offsets is None else tuple(self.offsets[row] for row in rows)
        return Seen(self.columns, tuple(self.tokens[row] for row in rows), digests, self.ended, offsets)

    def rows_that_go_on(self, ids: Tensor, copies: int) -> tuple[int, ...] | None:
        """Which row each row of a call of ``generate`` goes on with, told by the tokens.

        Args:
            ids: (B, N) as given to ``generate``, the whole conversation.
            copies: how many rows ``generate`` makes of each: beams or returned sequences.

        Returns:
            B * copies rows of this cache; None: it holds nothing yet, or does not know its tokens (inputs_embeds).

        Raises:
            CacheStateError: a row is another prompt, or the new tokens alone.
        """
        if not self.columns or self.digests is None:
            return None
        held: dict[bytes, list[int]] = {}
        for row, digest in enumerate(self.digests):
            held.setdefault(digest, []).append(row)
        given = [held.get(_hashed(row[: self.columns]), []) for row in ids]
        if all(given) and ids.shape[1] == self.columns:
            raise CacheStateError(
                f"this cache has seen all {self.columns} tokens given; add at least one to go on, or call "
                "cache.reset() to begin anew"
            )
        if not all(given) or ids.shape[1] < self.columns:
            row = 0 if ids.shape[1] < self.columns else given.index([])
            held_padding = any(tokens < self.columns for tokens in self.tokens)
            padded = ", padding included, which stays where it was" if held_padding else ""
            raise CacheStateError(
                f"row {row} of the input ({ids.shape[1]} tokens) begins with none of the {len(self.digests)} row(s) of "
                f"{self.columns} tokens that this cache holds{padded}; call cache.reset() before another prompt, or "
                "give the whole conversation to continue it"
            )
        wanted = [(row * copies + copy, rows) for row, rows in enumerate(given) for copy in range(copies)]
        # Rows alike may change places, and stay where they are if they can.
        return tuple(row if row in rows else rows[0] for row, rows in wanted)


def _hashed(ids: Tensor, digest: bytes = b"") -> bytes:
    """The digest after further token ids (n,), hashed in one by one: however they are chunked, it is the same."""
    for token in ids.tolist():
        digest = hashlib.blake2b(digest + token.to_bytes(8, "little", signed=True), digest_size=DIGEST).digest()
    return digest


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
    _check_positions(given.get("position_ids"), seen, new)
    if columns > 1:
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
    """Positions given beside new tokens must go on where the cache stands: they tell a new prompt from a turn."""
    if isinstance(position_ids, Tensor) and position_ids.ndim == 3:
        # M-RoPE counts images in height and width; where there are four rows, the first is the tokens' own count.
        position_ids = position_ids[0] if position_ids.shape[0] == 4 else None
    if not isinstance(position_ids, Tensor) or position_ids.shape[-1] != new.columns:
        return
    rows = position_ids.reshape(-1, new.columns).expand(new.batch, -1).to("cpu", torch.int64)
    for row, start, tokens in zip(rows, new.starts, seen.row_tokens(new.batch), strict=True):
        if start == new.columns:
            continue
        first, count = int(row[start]), new.columns - start
        if count > 1 and not torch.equal(row[start:], torch.arange(first, first + count, device="cpu")):
            raise KvwinnowError("the position_ids of a row's new tokens must count up by one; leave them out if unsure")
        if seen.columns and first not in (tokens, seen.columns + start):
            raise CacheStateError(
                f"the position_ids begin at {first} and this cache holds {tokens} tokens of that row; call "
                f"cache.reset() before another prompt, or continue at {tokens}"
            )

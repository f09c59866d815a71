"""What is compared: the peers, their environments and which of their caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from environments import Environment

HERE = Path(__file__).parent
TORCH = "2.13.0"


@dataclass(frozen=True)
class Peer:
    """One library.

    Attributes:
        name: what it is called in tables.
        runner: the file that serves its tasks.
        environment: where it is installed; None: in the environment that measures.
        settings: its caches.
        fills: whether its caches can be filled without computing a prompt.
    """

    name: str
    runner: Path
    environment: Environment | None
    settings: tuple[str, ...]
    fills: bool = False


@dataclass(frozen=True)
class Row:
    """One cache of one peer."""

    peer: Peer
    setting: str

    @property
    def name(self) -> str:
        return f"{self.peer.name}/{self.setting}"


PEERS = (
    Peer(
        "kvwinnow",
        HERE / "ours.py",
        None,
        ("full", "snapkv-8x", "snapkv-8x-int4", "h2o-8x", "full-compiled", "snapkv-8x-int4-compiled"),
        fills=True,
    ),
    Peer(
        "transformers",
        HERE / "transformers_caches.py",
        Environment("transformers", TORCH),
        ("dynamic", "quanto-int4", "hqq-int4", "fp8"),
        fills=True,
    ),
    Peer("kvpress", HERE / "kvpress_snapkv.py", Environment("kvpress", TORCH), ("snapkv-8x",), fills=True),
    Peer("llama.cpp", HERE / "llama_cpp_caches.py", Environment("llama_cpp"), ("f16", "q8_0", "q4_0"), fills=True),
    Peer(
        "openvino",
        HERE / "openvino_caches.py",
        Environment("openvino", TORCH),
        ("u8", "u4", "u8-evict-8x", "u4-evict-8x"),
    ),
)
FULL, BASELINE = "kvwinnow/full", "transformers/dynamic"
"""Uncompressed caches: what kvwinnow's own rows and what everything is compared with."""


def chosen(only: Sequence[str] | None) -> list[Row]:
    """All rows, or those that ``only`` names: a peer, or a row as PEER/SETTING (also one that is not run by default).

    Raises:
        SystemExit: a name is unknown.
    """
    peers = {peer.name: peer for peer in PEERS}
    everything = [Row(peer, setting) for peer in PEERS for setting in peer.settings]
    if not only:
        return everything
    rows: dict[str, Row] = {}
    for name in only:
        peer, _, setting = name.partition("/")
        if peer not in peers:
            raise SystemExit(f"--only {name!r} is no peer; take some of {', '.join(peers)}, or one row as PEER/SETTING")
        new = [Row(peers[peer], setting)] if setting else [row for row in everything if row.peer.name == peer]
        rows |= {row.name: row for row in new}
    return list(rows.values())

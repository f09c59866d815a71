"""Traces as Parquet files, one row for each token.

Columns:
    position: int32.
    token: string, the token's text.
    mass: fixed_size_list<float>[T * L * H], the weight the token received in step t, layer l, KV head h, in that order.
    key_norm: fixed_size_list<float>[L * H]; may be missing.
    keys, values: fixed_size_list<float or halffloat>[L * H * D]; only with vectors.
    head_mass: fixed_size_list<float>[d * L * Hq], for each decoded token, layer and query head; only with vectors.
    queries: binary, an .npz in the first row, null in the others: QueryFacts; only with vectors.

The schema's metadata has a JSON text under ``kvwinnow.trace``: version, prompt, steps, layers, kv_heads, fixed, model.
"""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
import zlib
from typing import Any

import numpy as np

from kvwinnow.errors import TraceError
from kvwinnow.simulation.trace import ModelShape, QueryFacts, Trace, Vectors
from kvwinnow.simulation.writing import StrPath, replacing

KEY = b"kvwinnow.trace"
VERSION = 1
_GROUP = 2**24
"""Numbers of the widest column in one row group."""


_DAMAGED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    OSError,
    EOFError,
    RecursionError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What reading a file raises that is not as it was written, pyarrow's own errors aside."""


def check_pyarrow() -> Any:
    """pyarrow and its Parquet part.

    Raises:
        TraceError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TraceError(
            "traces in Parquet need pyarrow, which is not installed; run: pip install 'kvwinnow[tools]'"
        ) from error
    return pyarrow


def write(trace: Trace, path: StrPath) -> None:
    """Write a trace, as a whole or not at all; what is there is replaced.

    Raises:
        TraceError: the file cannot be written, or pyarrow is missing.
    """
    pa = check_pyarrow()
    n = len(trace.tokens)
    columns: dict[str, Any] = {
        "position": pa.array(trace.positions),
        "token": pa.array([token.encode("utf-8", "replace").decode() for token in trace.tokens], pa.string()),
        "mass": _lists(pa, trace.mass.reshape(-1, n)),
    }
    if trace.key_norm is not None:
        columns["key_norm"] = _lists(pa, trace.key_norm.reshape(-1, n))
    if trace.vectors is not None:
        for name in ("keys", "values"):
            columns[name] = _lists(pa, np.swapaxes(getattr(trace.vectors, name), 2, 3).reshape(-1, n))
        if trace.vectors.head_mass.size:
            columns["head_mass"] = _lists(pa, trace.vectors.head_mass.reshape(-1, n))
        if trace.vectors.queries is not None:
            columns["queries"] = pa.array([_pack(trace.vectors.queries), *[None] * (n - 1)], pa.binary())
    told = {
        "version": VERSION,
        "prompt": trace.prompt,
        "steps": trace.steps.tolist(),
        "layers": trace.mass.shape[1],
        "kv_heads": trace.mass.shape[2],
        "fixed": trace.fixed,
        "model": None if trace.model is None else dataclasses.asdict(trace.model),
    }
    table = pa.table(columns).replace_schema_metadata({KEY: json.dumps(told).encode()})
    widest = max(column.type.list_size for column in table.columns if hasattr(column.type, "list_size"))
    with replacing(path) as draft:
        try:
            pa.parquet.write_table(
                table,
                draft,
                compression="zstd",
                use_dictionary=["token"],
                row_group_size=max(1, _GROUP // widest),
                write_page_checksum=True,
            )
        except pa.ArrowException as error:
            raise OSError(str(error)) from error


def read(path: StrPath) -> Trace:
    """Read a trace. Nothing in the file is executed.

    Raises:
        TraceError: there is no such file, it is no trace, it is damaged, or pyarrow is missing.
    """
    pa = check_pyarrow()
    try:
        # Memory-mapped files would fail later, and elsewhere, if they were changed.
        with pa.parquet.ParquetFile(path, page_checksum_verification=True) as file:
            metadata = file.schema_arrow.metadata or {}
            if KEY not in metadata:
                raise TraceError(
                    f"{str(path)!r} is a Parquet file and no trace; name one that kvwinnow record has written"
                )
            table = file.read()
    except FileNotFoundError as error:
        raise TraceError(f"trace {str(path)!r} does not exist; check the path") from error
    except (pa.ArrowException, OSError, OverflowError) as error:
        said = " ".join(str(error).split()).split(". ")[0].rstrip(".")
        raise TraceError(f"{str(path)!r} is no Parquet file or is damaged ({said[:120]}); record it anew") from error
    try:
        return _trace(table, json.loads(metadata[KEY]))
    except (*_DAMAGED, pa.ArrowException) as error:
        said = str(error) if isinstance(error, TraceError) else f"{type(error).__name__}: {error}"[:120]
        raise TraceError(
            f"{str(path)!r} is no trace that this version of kvwinnow reads, or is damaged ({said}); record it anew"
        ) from error


def _trace(table: Any, told: dict[str, Any]) -> Trace:
    if told["version"] != VERSION:
        raise TraceError(f"its version is {told['version']} and {VERSION} is read")
    model = told["model"]
    if model is not None:
        model = ModelShape(**(model | {"windows": tuple(model["windows"])}))
        _check_model(model)
    n, layers, heads = table.num_rows, int(told["layers"]), int(told["kv_heads"])
    steps = np.array(told["steps"], dtype=np.int32).reshape(-1, 2)
    names = table.column_names
    key_norm = _numbers(table, "key_norm", (layers, heads, n)) if "key_norm" in names else None
    trace = Trace(
        tokens=tuple(table["token"].to_pylist()),
        prompt=int(told["prompt"]),
        steps=steps,
        mass=_numbers(table, "mass", (len(steps), layers, heads, n)),
        key_norm=key_norm,
        vectors=_vectors(table, steps, layers, heads, int(told["prompt"]), model) if "keys" in names else None,
        model=model,
        fixed=_flag(told["fixed"]),
    )
    if not all(isinstance(token, str) for token in trace.tokens):
        raise TraceError("a token has no text")
    if table["position"].to_pylist() != list(range(n)):
        raise TraceError("its tokens are not in the order of their positions")
    return trace


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TraceError(f"{value!r} is neither true nor false")
    return value


def _check_model(model: ModelShape) -> None:
    _flag(model.softmax_sinks)
    sizes = (model.heads, model.kv_heads, model.dim, *(window for window in model.windows if window is not None))
    whole = all(type(size) is int and size > 0 for size in sizes) and model.itemsize in (1, 2, 4, 8)
    if not whole or model.heads % model.kv_heads or not isinstance(model.name, str):
        raise TraceError("its model has no such shape")


def _vectors(table: Any, steps: Any, layers: int, heads: int, prompt: int, model: ModelShape | None) -> Vectors:
    if model is None:
        raise TraceError("it has vectors and no model")
    n, decoded = table.num_rows, len(steps) - int(np.searchsorted(steps[:, 1], prompt, side="left")) - 1
    shape = (layers, heads, model.dim, n)
    keys, values = (np.swapaxes(_numbers(table, name, shape, half=True), 2, 3) for name in ("keys", "values"))
    size = (decoded, layers, model.heads, n)
    head_mass = _numbers(table, "head_mass", size) if decoded else np.zeros(size, np.float32)
    packed = table["queries"][0].as_py() if "queries" in table.column_names else None
    queries = None if packed is None else _unpack(packed)
    return Vectors(np.ascontiguousarray(keys), np.ascontiguousarray(values), head_mass, queries)


def _lists(pa: Any, rows: Any) -> Any:
    """(m, n) numbers as n lists of m."""
    flat = np.ascontiguousarray(rows.T).reshape(-1)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), rows.shape[0])


def _numbers(table: Any, name: str, shape: tuple[int, ...], *, half: bool = False) -> Any:
    """The opposite of ``_lists``: a column as an array whose last axis are the tokens."""
    column = table[name]
    width = int(np.prod(shape[:-1]))
    if getattr(column.type, "list_size", None) != width or column.null_count:
        raise TraceError(f"column {name} is {column.type} and should be lists of {width}")
    parts = [np.asarray(chunk.flatten().to_numpy(zero_copy_only=False)) for chunk in column.chunks]
    flat = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if flat.dtype not in ((np.float32, np.float16) if half else (np.float32,)):
        raise TraceError(f"column {name} holds {flat.dtype}")
    return np.ascontiguousarray(flat.reshape(shape[-1], width).T).reshape(shape)


def _pack(facts: QueryFacts) -> bytes:
    stream = io.BytesIO()
    arrays: dict[str, Any] = {name: getattr(facts, name) for name in ("lead", "mean", "products", "scale")}
    arrays |= {f"angles{index}": table for index, table in enumerate(facts.angles)}
    arrays["tables"] = np.array(facts.tables, dtype=np.int64)
    np.savez(stream, allow_pickle=False, count=np.int64(facts.count), **arrays)
    return stream.getvalue()


def _unpack(packed: bytes) -> QueryFacts:
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        angles = tuple(arrays[f"angles{index}"] for index in range(len([a for a in arrays if a.startswith("angles")])))
        tables = tuple((int(table), bool(pairs)) for table, pairs in arrays["tables"])
        return QueryFacts(
            lead=arrays["lead"],
            count=int(arrays["count"]),
            mean=arrays["mean"],
            products=arrays["products"],
            scale=arrays["scale"],
            angles=angles,
            tables=tables,
        )

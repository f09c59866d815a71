"""One safetensors file of named tensors and texts: written as a whole or not at all, and checked when it is read.

Its last tensor, ``checksum``, is a BLAKE2 hash of everything else. It tells damage, not forgery: whoever reads a file
still has to check that each tensor is what it must be, before the tensor is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvwinnow.errors import DocumentError
from kvwinnow.whole_file import replaced

CHECKSUM = "checksum"
_BYTES = 32
_NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}

Spec = tuple[str, tuple[int, ...]]
"""dtype, as safetensors names it, and shape of a tensor."""

StrPath = str | os.PathLike[str]


def spec_of(tensor: Tensor) -> Spec:
    """What a file says about a tensor."""
    return _NAMES[tensor.dtype], tuple(tensor.shape)


# -- writing ---------------------------------------------------------------------------------------


def write(path: StrPath, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    """Write a file, or leave what is there as it was.

    Args:
        path: the file; what is there is replaced.
        tensors: on any device.
        texts: the file's metadata.

    Raises:
        DocumentError: the file cannot be written.
    """
    target = checked(path)
    try:
        if target.exists() and not target.is_file():
            raise DocumentError(f"{str(target)!r} is no file that could be replaced; name another")
        with replaced(target) as draft, open(draft, "xb") as stream:
            _write(stream, tensors, texts)
    except OSError as error:
        raise DocumentError(
            f"{str(target)!r} cannot be written: {error.strerror or error}; name a file in a folder that exists, with "
            "room for it, that you may write to"
        ) from error


def _write(stream: Any, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> None:
    names = sorted(tensors)
    specs = {name: spec_of(tensors[name]) for name in names}
    header: dict[str, Any] = {"__metadata__": dict(texts)}
    offset = 0
    for name in names:
        size = tensors[name].numel() * tensors[name].itemsize
        header[name] = _entry(*specs[name], offset, size)
        offset += size
    header[CHECKSUM] = _entry("U8", (_BYTES,), offset, _BYTES)
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    stream.write(len(packed).to_bytes(8, "little"))
    stream.write(packed)
    running = _begun(texts, specs)
    for name in names:
        data = _bytes_of(tensors[name])
        running.update(data)
        stream.write(data)
    stream.write(running.digest())


def _entry(dtype: str, shape: tuple[int, ...], offset: int, size: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return memoryview(plain.numpy())  # type: ignore[arg-type]


def _begun(texts: Mapping[str, str], specs: Mapping[str, Spec]) -> Any:
    """A checksum that covers what the header says."""
    told = json.dumps([sorted(texts.items()), sorted(specs.items())]).encode()
    return hashlib.blake2b(told, digest_size=_BYTES)


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorFile:
    """An open file, of which only the header was read so far.

    Attributes:
        shown: the file's name, as complaints show it.
        texts: its metadata.
        specs: dtype and shape of each tensor, the checksum aside.
    """

    shown: str
    texts: dict[str, str]
    specs: dict[str, Spec]
    _handle: Any

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, on the CPU.

        Raises:
            DocumentError: their checksum is another.
        """
        running, read = _begun(self.texts, self.specs), {}
        for name in sorted(self.specs):
            # A copy, since what the handle gives is a view of the whole file, mapped into memory.
            read[name] = self._handle.get_tensor(name).clone()
            running.update(_bytes_of(read[name]))
        if bytes(_bytes_of(self._handle.get_tensor(CHECKSUM))) != running.digest():
            raise self.damaged("its checksum is another")
        return read

    def damaged(self, how: str) -> DocumentError:
        """The complaint that the file is not as it was written."""
        return DocumentError(f"{self.shown} is damaged ({how}); save the document again")


@contextlib.contextmanager
def opened(path: StrPath) -> Iterator[TensorFile]:
    """Open a file that ``write`` wrote, or another safetensors file.

    Raises:
        DocumentError: it cannot be read, or is no safetensors file with a checksum.
    """
    target = checked(path)
    shown = repr(str(target))
    try:
        if not stat.S_ISREG(os.stat(target).st_mode):
            raise DocumentError(f"{shown} is a folder or device; name a file that cache.save(path) wrote")
        with safe_open(target, framework="pt", device="cpu") as handle:
            specs = {}
            for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
                part = handle.get_slice(name)
                specs[name] = (str(part.get_dtype()), tuple(part.get_shape()))
            if specs.pop(CHECKSUM, None) != ("U8", (_BYTES,)):
                raise _foreign(shown)
            yield TensorFile(shown, dict(handle.metadata() or {}), specs, handle)
    except FileNotFoundError as error:
        raise DocumentError(f"{shown} does not exist; name a file that cache.save(path) wrote") from error
    except SafetensorError as error:
        raise _foreign(shown) from error
    except OSError as error:
        raise DocumentError(
            f"{shown} cannot be read: {error.strerror or error}; name a file that you may read"
        ) from error


def _foreign(shown: str) -> DocumentError:
    return DocumentError(
        f"{shown} is no saved cache, or only a part of one; name a file that cache.save(path) wrote, or save it again"
    )


def checked(path: StrPath) -> Path:
    """The file behind links and a leading ~.

    Raises:
        DocumentError: ``path`` is no path.
    """
    try:
        return Path(os.path.realpath(os.path.expanduser(os.fspath(path))))
    except (TypeError, ValueError) as error:
        raise DocumentError(f"{path!r} is no path ({error}); name a file") from error

"""kvwinnow for Hugging Face transformers (5.16 and newer)."""

from kvwinnow.integrations.transformers.cache import CompressedCache
from kvwinnow.integrations.transformers.compiled import CompiledDecode, compile_decode
from kvwinnow.integrations.transformers.report import CacheReport

__all__ = ["CacheReport", "CompiledDecode", "CompressedCache", "compile_decode"]

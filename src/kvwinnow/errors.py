"""What kvwinnow raises when a user's input cannot be served: one sentence with the value, the limit and the way out."""


class KvwinnowError(ValueError):
    """Bad input to kvwinnow. The message is a sentence a user can act on; the command line prints it as it is."""


class PolicyError(KvwinnowError):
    """A policy that does not exist, or whose parameters contradict each other."""


class CodecError(KvwinnowError):
    """A storage format that does not exist, or that does not fit the model's head dimension."""


class DocumentError(KvwinnowError):
    """A saved cache that cannot be written, or a file that is none, is damaged or belongs to another model."""


class TraceError(KvwinnowError):
    """A trace that cannot be read, made or written, or that does not hold what is asked of it."""


class UnsupportedModelError(KvwinnowError):
    """A model whose attention kvwinnow has not been tested on."""


class CacheStateError(KvwinnowError):
    """A call that the cache's present content does not allow (another prompt, another batch, an interrupted call)."""


class UnsupportedSetupError(KvwinnowError):
    """An installation or a configuration around kvwinnow, such as vLLM's, that it has not been tested with."""

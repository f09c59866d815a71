"""GPUs and the memory that their drivers report, which is not what their names say."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from kvwinnow.errors import KvwinnowError, PolicyError
from kvwinnow.policies.budget import parse_size

MIB = 2**20


@dataclass(frozen=True)
class GPU:
    """Some GPUs of one kind.

    Attributes:
        name: of the kind, or the size as the user wrote it.
        memory: bytes of one of them.
        count: how many.
        source: where the bytes are from.
    """

    name: str
    memory: int
    count: int = 1
    source: str = ""

    def __post_init__(self) -> None:
        for what, value in (("memory", self.memory), ("count", self.count)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise KvwinnowError(f"the {what} of GPU {self.name!r} is {value!r}; give a whole number, 1 or more")

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.name}x{self.count}"


_TABLE = "https://thundergolfer.com/blog/nvidia-gpu-memory-capacity"

# MiB that the driver reports (nvidia-smi, NVML; for AMD the pool that rocminfo shows), and where that was seen. "80GB"
# in a name is neither 80 * 10^9 bytes nor 80 * 2^30. A process can allocate some 0.5 GiB less, since CUDA keeps its own
# part: an H100 of 79.65 GiB shows PyTorch 79.10 GiB (https://github.com/huggingface/trl/issues/2688). The planner's
# overhead covers that.
_MIB: dict[str, tuple[int, str]] = {
    "T4": (15_360, _TABLE),
    "A10": (23_028, _TABLE),
    "L4": (23_034, _TABLE),
    "L40S": (46_068, _TABLE),
    "A100-40GB": (40_960, _TABLE),
    "A100-80GB": (81_920, _TABLE),
    "H100-80GB": (81_559, _TABLE),
    "H100-94GB": (95_830, "nvidia-smi of several H100 NVL"),
    "H200": (143_771, _TABLE),
    "B200": (183_359, "https://github.com/NVIDIA/TensorRT-LLM/issues/10278"),
    "RTX-3090": (24_576, "https://github.com/noonghunna/club-3090/issues/1128"),
    "RTX-4090": (24_564, "https://github.com/vllm-project/vllm/issues/7553"),
    "RTX-5090": (32_607, "https://github.com/noonghunna/club-3090/issues/1107"),
    "RTX-A6000": (49_140, "nvidia-smi of several RTX A6000"),
    "MI300X": (196_592, "https://github.com/ROCm/legacy-rocm-build/issues/4414"),
}

GPUS: dict[str, GPU] = {name: GPU(name, mib * MIB, source=source) for name, (mib, source) in _MIB.items()}
"""By name."""

_ALIASES = {
    "h100": "H100-80GB",
    "h100sxm": "H100-80GB",
    "h100pcie": "H100-80GB",
    "h100nvl": "H100-94GB",
    "h200141gb": "H200",
    "b200180gb": "B200",
    "a1024gb": "A10",
    "l424gb": "L4",
    "l40s48gb": "L40S",
    "t416gb": "T4",
    "3090": "RTX-3090",
    "4090": "RTX-4090",
    "5090": "RTX-5090",
    "a6000": "RTX-A6000",
    "mi300x192gb": "MI300X",
}

_TIMES = re.compile(r"(?:(?P<before>\d{1,3})\s*[x*]\s*)?(?P<name>.+?)(?:\s*[x*]\s*(?P<after>\d{1,3}))?", re.IGNORECASE)


def parse_gpu(text: str) -> GPU:
    """Some GPUs from a name and a number: "H100-80GB", "H100-80GBx8", "8xH100", "24GiB", "2x48GiB".

    Sizes are what they say: GB are 10^9 bytes, GiB 2^30. A name stands for what the driver reports.

    Raises:
        KvwinnowError: an unknown GPU, a size of 0, or a number under 1.
    """
    match = _TIMES.fullmatch(text.strip())
    if match is None or (match["before"] and match["after"]):
        raise KvwinnowError(f"GPU {text!r} is none; write a name or a size, and xN for several: H100-80GBx8, 2x48GiB")
    count = int(match["before"] or match["after"] or 1)
    if count < 1:
        raise KvwinnowError(f"GPU {text!r} is a number of {count} GPUs; give 1 or more, such as H100-80GBx8")
    known = {_plain(name): name for name in GPUS} | _ALIASES
    name = known.get(_plain(match["name"]))
    if name is not None:
        return GPU(name, GPUS[name].memory, count, GPUS[name].source)
    try:
        return GPU(match["name"], parse_size(match["name"]), count, "as given")
    except PolicyError:
        plain = _plain(match["name"])
        begin = [other for other in known if plain and other.startswith(plain)]
        near = [] if plain[:1].isdigit() else difflib.get_close_matches(plain, known, n=4, cutoff=0.6)
        meant = list(dict.fromkeys(known[close] for close in begin or near))[:2]
        hint = f"did you mean {' or '.join(meant)}? Known are" if meant else "known are"
        raise KvwinnowError(
            f"GPU {text!r} is unknown; {hint} {', '.join(GPUS)}, and sizes such as 24GiB or 2x48GiB"
        ) from None


def sold_size(name: str) -> str | None:
    """A note on a size in GB, by which cards are sold that have GiB; None: ``name`` is no such size.

    Args:
        name: of a ``GPU``, such as "24GB".
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*GB\s*", name, re.IGNORECASE)
    if match is None:
        return None
    size, gib = match[1], float(match[1]) * 10**9 / 2**30
    # Error correction may take a sixteenth.
    like = [gpu for gpu in GPUS.values() if 0.93 * float(size) <= gpu.memory / 2**30 <= float(size)]
    if not like:
        return f"{size}GB is {gib:.2f} GiB; for a card that is sold as {size} GB give {size}GiB"
    memories = [f"{gpu.memory / 2**30:.1f}" for gpu in sorted(like, key=lambda gpu: gpu.memory)]
    report = memories[0] if memories[0] == memories[-1] else f"{memories[0]} to {memories[-1]}"
    names = " or ".join(gpu.name for gpu in like)
    return f"{size}GB is {gib:.2f} GiB; cards sold as {size} GB report {report} GiB: give {names}, or {size}GiB"


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("nvidia", "").replace("geforce", "").replace("amd", ""))

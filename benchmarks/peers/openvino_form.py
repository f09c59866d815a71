"""A model in OpenVINO's form, written beside it once: the same weights in the same format, nothing compressed.

`optimum-cli export openvino` is not used: it quantises every model of a billion parameters or more to int8 unless it
is told another format, of which bfloat16 is none. Here the model is loaded in the format in which its weights are
stored and handed to the exporter as it is; that format is checked in what was written.

    python benchmarks/peers/openvino_form.py FOLDER      (in the environment of requirements-openvino.txt)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from forms import made_from, place_of

MODEL = "openvino_model.xml"
FLOATS = {"f32", "f16", "bf16"}
EMBEDDING = 2  # dimensions of a weight; vectors and scalars may have another format


def form_of(model: Path) -> Path:
    """The folder of the model in OpenVINO's form; a process of its own makes it, so that no memory of it stays.

    Raises:
        RuntimeError: it could not be made; the message is one sentence.
    """
    folder = place_of(model) / "openvino"
    if not made_from(folder / MODEL, model):
        done = subprocess.run([sys.executable, __file__, str(model)], capture_output=True, text=True, check=False)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing was said"]
            raise RuntimeError(f"OpenVINO's form of {model.name} could not be written: {said[-1]}")
    return folder


def export(model: Path) -> Path:
    """Write the form, as a whole or not at all."""
    import torch
    from optimum.exporters.openvino.__main__ import maybe_convert_tokenizers
    from optimum.exporters.openvino.convert import export_from_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = place_of(model) / "openvino"
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".openvino-", dir=folder.parent))
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto", local_files_only=True)
        sixteen = loaded.dtype in (torch.bfloat16, torch.float16)
        export_from_model(loaded, draft, task="text-generation-with-past", stateful=True, patch_16bit_model=sixteen)
        maybe_convert_tokenizers(
            "transformers", draft, loaded, [AutoTokenizer.from_pretrained(model)], task="text-generation-with-past"
        )
        check(draft, {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[loaded.dtype])
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def check(folder: Path, wanted: str) -> None:
    """Refuse a form whose matrices are in another format than the model's."""
    found = formats(folder)
    if found != {wanted}:
        raise RuntimeError(f"OpenVINO's form has its matrices in {', '.join(sorted(found))} instead of {wanted}")


def formats(folder: Path) -> set[str]:
    """The formats of all constant matrices in a form."""
    import openvino

    graph = openvino.Core().read_model(folder / MODEL)
    constants = (op for op in graph.get_ops() if op.get_type_name() == "Constant" and len(op.shape) >= EMBEDDING)
    return {op.get_element_type().get_type_name() for op in constants if min(op.shape) > 1}


if __name__ == "__main__":
    print(export(Path(sys.argv[1])))

"""An architecture read from a config equals what the model itself shows."""

from __future__ import annotations

import pytest

from kvwinnow.integrations.transformers.structure import inspect_model
from kvwinnow.planning.architecture import Attention
from kvwinnow.planning.config import architecture
from tests.models import KINDS, shown, tiny_model


@pytest.mark.parametrize("kind", KINDS, ids=shown)
def test_an_architecture_is_the_models_structure(kind: str) -> None:
    model = tiny_model(kind, layers=4)
    structure = inspect_model(model)
    read = architecture(model.config.to_dict())
    expected = tuple(Attention(structure.heads, structure.kv_heads, structure.dim, w) for w in structure.sliding)
    assert read.layers == expected
    assert read.trained == structure.trained_length
    assert read.unserved is None
    if "text decoder" in KINDS[kind].features:
        decoder = model.get_decoder()
        true = sum(p.numel() for p in decoder.parameters()) + model.lm_head.weight.numel()
    else:
        true = sum(p.numel() for p in model.parameters())
    assert read.parameters is not None
    assert read.parameters.total == true

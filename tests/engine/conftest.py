"""Fixtures of the engine tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from octavo.models import LoadedModel, load_model, resolve_model
from tests.engine.helpers import tiny_checkpoint


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Any]:
    """A tiny random model, loaded by octavo and by transformers."""
    directory, model = tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    return load_model(directory), model


@pytest.fixture(scope="session")
def other_tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Another random model of the same vocabulary, of another shape."""
    folder = tmp_path_factory.mktemp("other")
    return load_model(tiny_checkpoint(folder, seed=5, num_hidden_layers=1, num_key_value_heads=1)[0])


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    """The default model in float32."""
    return load_model("smollm2", weights="float32")


@pytest.fixture(scope="session")
def smollm2_reference() -> Any:
    """The default model in transformers, float32."""
    path = resolve_model("smollm2")
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()

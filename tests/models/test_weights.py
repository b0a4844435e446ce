"""Formats of weights: as stored, rounded, refused; what the decoder makes of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("octavo.attention._cpu")

from octavo.models import UnsupportedModel
from octavo.models.projections import TorchProjections
from tests.models.gguf_files import QuantType, decoder_from_gguf
from tests.models.helpers import decoder_from, expected_logits, paged_logits, prompt, save, tiny_model
from tests.models.test_gguf import QUANTISED, write_twin

FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Llama", {}),
    ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    ("Qwen2", {"mlp_bias": True}),
    ("Qwen3", {"head_dim": 32, "attention_bias": True}),
)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference, in parts of the spread of the wanted logits."""
    return float((found - wanted).pow(2).mean().sqrt() / wanted.std())


@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=str)
@pytest.mark.parametrize(("weights", "allowed"), [("float32", 1e-5), ("int8", 0.05), ("int4", 0.5)])
def test_rounded_weights_stay_near(
    family: str, options: dict[str, Any], weights: str, allowed: float, tmp_path: Path
) -> None:
    """Logits in every format are as near transformers' as its bits allow, and no nearer."""
    model = tiny_model(family, **options)
    decoder = decoder_from(save(model, tmp_path), weights=weights)
    (found,) = paged_logits(decoder, [prompt(40)])
    error = distance(found, expected_logits(model, prompt(40)))
    assert error < allowed
    assert weights == "float32" or error > allowed / 50, "nothing was rounded"
    assert f"(--weights {weights})" in decoder.weights_note


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_stored_formats_run_as_stored(kind: str, tmp_path: Path) -> None:
    """A file of one quantised type keeps its bytes; only activations are rounded, so logits stay near."""
    model = tiny_model(num_attention_heads=4, head_dim=16, hidden_size=96)
    types = dict.fromkeys(("attn_", "ffn_", "token_embd", "output.weight"), QuantType[kind])
    types = {"norm": QuantType.F32, **types}
    path = write_twin(tmp_path / "model.gguf", model, "llama", types)
    decoder = decoder_from_gguf(path, "auto")
    assert decoder.weights_note == f"as stored: 16 {kind.lower()} (--weights auto)"
    exact = decoder_from_gguf(path)
    assert distance(paged_logits(exact, [prompt(40)])[0], expected_logits(model, prompt(40))) < 1e-5
    error = distance(paged_logits(decoder, [prompt(40)])[0], expected_logits(model, prompt(40)))
    assert 1e-4 < error < 0.05
    assert decoder.weights_bytes < exact.weights_bytes * (0.3 if kind == "Q8_0" else 0.2)


def test_other_types_become_eight_bits(tmp_path: Path) -> None:
    """Types without a kernel run in eight bits, mixed stacks too, and the note says from what."""
    model = tiny_model()
    path = write_twin(tmp_path / "model.gguf", model, "llama", QUANTISED)
    decoder = decoder_from_gguf(path, "auto")
    note = decoder.weights_note
    for part in ("2 q8_0 from Q5_1", "2 float32 from Q5_0", "q8_0 from Q4_0", "float32"):
        assert part in note
    error = distance(paged_logits(decoder, [prompt(40)])[0], expected_logits(model, prompt(40)))
    assert error < 0.05


def test_rows_that_are_no_whole_groups_stay_float32(tmp_path: Path) -> None:
    """A matrix whose rows are not a multiple of 32 stays float32, and the note counts it."""
    model = tiny_model(intermediate_size=80)
    decoder = decoder_from(save(model, tmp_path), weights="int8")
    assert decoder.weights_note == "matrices: 2 float32, 14 q8_0 from F32 (--weights int8)"
    assert distance(paged_logits(decoder, [prompt(9)])[0], expected_logits(model, prompt(9))) < 0.05


def test_what_cannot_be_had_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown format, a rounded one in bfloat16, and one without kernels are refused by name."""
    directory = save(tiny_model(), tmp_path)
    with pytest.raises(UnsupportedModel, match=r"'int3' is not one of auto, float32, int8, int4"):
        decoder_from(directory, weights="int3")
    with pytest.raises(UnsupportedModel, match=r"'int8' are computed in float32, not in torch.bfloat16"):
        decoder_from(directory, torch.bfloat16, "int8")
    monkeypatch.setitem(sys.modules, "octavo.models.packed", None)
    with pytest.raises(UnsupportedModel, match=r"'int4' cannot be had: the compiled kernels"):
        decoder_from(directory, weights="int4")
    without = decoder_from(directory)
    assert "kernels are not available" in without.weights_note
    assert isinstance(without._projections, TorchProjections)
    (found,) = paged_logits(without, [prompt(20)])
    assert distance(found, expected_logits(tiny_model(), prompt(20))) < 1e-5


@pytest.mark.parametrize(("family", "options"), FAMILIES, ids=str)
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_one_call_for_all_layers_equals_the_loop(
    family: str, options: dict[str, Any], weights: str, tmp_path: Path
) -> None:
    """A backend that is not the compiled one itself gets the decoder's loop, and the bits of the one call."""
    pytest.importorskip("octavo.attention.cpu")
    from octavo.attention.cpu import CpuBackend

    class Counting(CpuBackend):
        attended = 0

        def paged_attention(self, *args: Any, **kwargs: Any) -> Any:
            Counting.attended += 1
            return super().paged_attention(*args, **kwargs)

    decoder = decoder_from(save(tiny_model(family, **options), tmp_path), weights=weights)
    prompts = [prompt(length, seed=length) for length in (1, 9, 70)]
    for chunk in (1, 10_000):
        Counting.attended = 0
        loop = paged_logits(decoder, prompts, chunk, backend=Counting())
        assert Counting.attended == decoder.config.num_layers * (1 if chunk > 70 else 70)
        whole = paged_logits(decoder, prompts, chunk, backend=CpuBackend())
        assert all(torch.equal(a, b) for a, b in zip(loop, whole, strict=True))


@pytest.mark.parametrize("weights", ["float32", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_has_the_same_bits_in_any_company(weights: str, threads: int, tmp_path: Path) -> None:
    """Logits of a prompt are equal, bit by bit, alone, in a batch, in chunks and on more threads."""
    pytest.importorskip("octavo.attention.cpu")
    from octavo.attention.cpu import CpuBackend

    model = tiny_model("Qwen3", head_dim=32)
    decoder = decoder_from(save(model, tmp_path), weights=weights)
    prompts = [prompt(length, seed=length) for length in (1, 9, 30, 200)]
    torch.set_num_threads(1)
    alone = [paged_logits(decoder, [ids], backend=CpuBackend())[0] for ids in prompts]
    torch.set_num_threads(threads)
    for chunk in (1, 7, 10_000):
        together = paged_logits(decoder, prompts, chunk, backend=CpuBackend())
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))

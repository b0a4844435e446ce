"""The decoder against transformers, logits at every position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.attention import AttentionBatch, LayerCache, ReferenceBackend, make_backend
from octavo.models import ModelError, UnsupportedModel
from tests.models.helpers import (
    assert_same_logits,
    decoder_from,
    expected_logits,
    paged_logits,
    prompt,
    save,
    tiny_model,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"head_dim": 32}),
        ("Llama", {"head_dim": 12}),
        ("Llama", {"attention_bias": True}),
        ("Llama", {"mlp_bias": True, "num_key_value_heads": 4}),
        ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 0.1}),
        ("Mistral", {"sliding_window": None, "head_dim": 32}),
        ("Qwen2", {}),
        ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("Qwen3", {"head_dim": 32}),
        ("Qwen3", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
    ],
    ids=str,
)
def test_logits_equal_transformers(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Every family and option gives transformers' logits, for a prompt of 40 tokens."""
    model = tiny_model(family, **options)
    assert_same_logits(decoder_from(save(model, tmp_path)), model, prompt(40))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7])
def test_chunks_and_batches_change_nothing(block_size: int, chunk: int, tmp_path: Path) -> None:
    """Prompts of unlike lengths, run together in chunks or token by token, give the same logits."""
    model = tiny_model("Qwen3", head_dim=12)
    decoder = decoder_from(save(model, tmp_path))
    prompts = [prompt(length, seed=length) for length in (1, 9, 30)]
    for found, ids in zip(paged_logits(decoder, prompts, chunk, block_size), prompts, strict=True):
        torch.testing.assert_close(found, expected_logits(model, ids), atol=1e-4, rtol=1e-4)


def test_llama3_scaling_holds_at_every_position(tmp_path: Path) -> None:
    """llama3 rope, original context 64, prompt 300: right past the original context too."""
    model = tiny_model(rope_parameters=LLAMA3)
    decoder = decoder_from(save(model, tmp_path))
    assert_same_logits(decoder, model, prompt(300))
    plain = tiny_model()
    gap = (expected_logits(plain, prompt(300)) - expected_logits(model, prompt(300))).abs().max()
    assert gap > 0.1, "the scaling must matter for this test to mean anything"


@pytest.mark.parametrize("spelling", ["type", "rope_type", "nested"])
@pytest.mark.parametrize(("kind", "factor"), [("linear", 4.0), ("dynamic", 2.0)])
def test_scaling_under_every_spelling(spelling: str, kind: str, factor: float, tmp_path: Path) -> None:
    """`type`, `rope_type` and transformers 5's rope_parameters mean the same scaling."""
    model = tiny_model(rope_parameters={"rope_type": kind, "factor": factor, "rope_theta": 5000.0})
    changes: dict[str, Any] = {}
    if spelling != "nested":
        scaling = {spelling: kind, "factor": factor}
        changes = {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": 5000.0}
    assert_same_logits(decoder_from(save(model, tmp_path, **changes)), model, prompt(100))


def test_positions_below_zero_are_refused(tmp_path: Path) -> None:
    """The kernels look angles up by position, so one outside their table must not reach them."""
    save(tiny_model(), tmp_path)
    decoder = decoder_from(tmp_path)
    batch = AttentionBatch(
        tables=torch.zeros(1, 1, dtype=torch.int32),
        query_start=torch.tensor([0, 2], dtype=torch.int32),
        kv_len=torch.tensor([2], dtype=torch.int32),
        slots=torch.arange(2),
    )
    for name in ("auto", "reference"):
        backend = make_backend(name)
        config = decoder.config
        caches = [
            backend.allocate(1, 16, config.num_kv_heads, config.head_dim, torch.float32)
            for _ in range(config.num_layers)
        ]
        with pytest.raises(ModelError, match="position -1"):
            decoder.forward(torch.tensor([1, 2]), torch.tensor([-1, 0]), caches, batch, backend)


def test_dynamic_scaling_refuses_positions_past_the_context(tmp_path: Path) -> None:
    """Past max_position_embeddings dynamic scaling would change cached keys: a ModelError, by name."""
    model = tiny_model(
        max_position_embeddings=17,  # no power of two, which the rotary table's size is
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    )
    decoder = decoder_from(save(model, tmp_path))
    assert decoder.config.position_limit == 17
    assert_same_logits(decoder, model, prompt(17))
    with pytest.raises(ModelError, match=r"position 17 .*max_position_embeddings 17.*dynamic"):
        paged_logits(decoder, [prompt(18)])


def test_rotary_table_grows_past_its_first_size(tmp_path: Path) -> None:
    """Positions past the first table, in a model that starts with a small one, are right as well."""
    model = tiny_model(max_position_embeddings=8)
    assert_same_logits(decoder_from(save(model, tmp_path)), model, prompt(70))


@pytest.mark.parametrize(
    ("family", "options", "windowed"),
    [
        ("Mistral", {"sliding_window": 8}, True),
        ("Mistral", {"sliding_window": 8, "use_sliding_window": False}, True),
        ("Qwen2", {"sliding_window": 8, "use_sliding_window": False}, False),
        ("Qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, True),
    ],
    ids=str,
)
def test_window_only_when_in_use(
    family: str, options: dict[str, Any], windowed: bool, tmp_path: Path
) -> None:
    """A window of 8 acts on a prompt of 40 where it is switched on, and only in those layers."""
    model = tiny_model(family, **options)
    directory = save(model, tmp_path)
    if family == "Mistral" and "use_sliding_window" in options:  # the file says so, whoever reads it
        directory = save(model, tmp_path, use_sliding_window=options["use_sliding_window"])
    if family == "Qwen2":  # what checkpoints out there say: a size, and the switch off
        off = {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0}
        directory = save(model, tmp_path, **off, layer_types=None)
    decoder = decoder_from(directory)
    assert (decoder.config.sliding_window == 8) is windowed
    assert_same_logits(decoder, model, prompt(40))
    full = tiny_model(family, **{**options, "sliding_window": None, "use_sliding_window": False})
    same = torch.allclose(expected_logits(full, prompt(40)), expected_logits(model, prompt(40)), atol=1e-3)
    assert same is not windowed


def test_sharded_checkpoint_equals_single_file(tmp_path: Path) -> None:
    """Several shards with an index give the same logits as one file."""
    model = tiny_model()
    save(model, tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = decoder_from(tmp_path / "one"), decoder_from(tmp_path / "many")
    assert torch.equal(paged_logits(one, [prompt(20)])[0], paged_logits(many, [prompt(20)])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    """In bfloat16 and float16, logits are float32 and as near transformers' as the dtype allows."""
    model = tiny_model("Qwen3", head_dim=32)
    decoder = decoder_from(save(model, tmp_path), dtype)
    assert decoder.dtype == dtype
    exact = expected_logits(model, prompt(30))
    rounded = expected_logits(model.to(dtype), prompt(30))
    (found,) = paged_logits(decoder, [prompt(30)])
    assert found.dtype == torch.float32
    assert (found - exact).abs().mean() < 1.5 * (rounded - exact).abs().mean()


def test_other_dtypes_are_refused(tmp_path: Path) -> None:
    """float64 weights are refused, naming the supported dtypes."""
    with pytest.raises(UnsupportedModel, match=r"torch.float64.*torch.float32"):
        decoder_from(save(tiny_model(), tmp_path), torch.float64)


def test_logits_may_be_taken_for_some_rows(tmp_path: Path) -> None:
    """logits() of a subset of rows equals the same rows of logits() of all."""
    decoder = decoder_from(save(tiny_model(), tmp_path))
    hidden = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    rows = torch.tensor([8, 2])
    torch.testing.assert_close(decoder.logits(hidden[rows]), decoder.logits(hidden)[rows])


def test_weights_bytes_counts_a_tied_head_once(tmp_path: Path) -> None:
    """weights_bytes is the bytes of transformers' parameters, tied or not, halved in bfloat16."""
    for tied in (True, False):
        model = tiny_model(tie_word_embeddings=tied)
        directory = save(model, tmp_path / str(tied))
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert decoder_from(directory).weights_bytes == 4 * parameters
        assert decoder_from(directory, torch.bfloat16).weights_bytes == 2 * parameters


def test_wrong_number_of_caches_is_refused(tmp_path: Path) -> None:
    """One cache for two layers is a ModelError with both numbers."""
    decoder = decoder_from(save(tiny_model(), tmp_path))
    one = torch.zeros(1, dtype=torch.int64)
    batch = AttentionBatch(one.view(1, 1).int(), torch.tensor([0, 1]).int(), one.int() + 1, one)
    with pytest.raises(ModelError, match="0 caches were given for 2 layers"):
        decoder.forward(one, one, [], batch, ReferenceBackend())


class InTwoSteps(ReferenceBackend):
    """The backend of this machine, but rotation and writing are separate steps in torch."""

    def __init__(self) -> None:
        super().__init__()
        fast = make_backend()
        self.write_kv = fast.write_kv  # type: ignore[method-assign]
        self.paged_attention = fast.paged_attention  # type: ignore[method-assign]


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("family", "options"), [("Llama", {}), ("Qwen3", {"head_dim": 20}), ("Qwen2", {})])
def test_rotating_while_writing_changes_no_bit(
    family: str, options: dict[str, Any], weights: torch.dtype, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Logits of whole prompts and of chunks are bit for bit those of two steps, also after q and k norms."""
    decoder = decoder_from(save(tiny_model(family, **options), tmp_path), weights)
    prompts = [prompt(70, seed=3), prompt(1, seed=4), prompt(23, seed=5)]
    for chunk in (10_000, 7):
        one = paged_logits(decoder, prompts, chunk, backend=make_backend(), kv_dtype=kv_dtype)
        two = paged_logits(decoder, prompts, chunk, backend=InTwoSteps(), kv_dtype=kv_dtype)
        for a, b in zip(one, two, strict=True):
            assert a.isfinite().all()
            assert torch.equal(a, b)


def test_a_backend_that_only_writes_inherits_the_rotation() -> None:
    """The interface's default rotates query and key in place, then writes the rotated key."""
    backend, cache = ReferenceBackend(), LayerCache.allocate(3, 5, 2, 8, torch.float32)
    query, key, value = torch.randn(4, 6, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    angles = torch.randn(4, 1, 4)
    turn = torch.polar(torch.ones(4, 1, 4), angles)  # as complex numbers: dimension i and i + 4
    want = [torch.complex(*rows.chunk(2, -1)) * turn for rows in (query, key)]
    slots = torch.tensor([14, 0, 7, 3])
    backend.rotate_and_write_kv(query, key, value, angles.cos(), angles.sin(), cache, slots)
    for rows, turned in zip((query, key), want, strict=True):
        torch.testing.assert_close(rows, torch.cat((turned.real, turned.imag), -1))
    assert torch.equal(cache.key.view(15, 2, 8)[slots], key)
    assert torch.equal(cache.value.view(15, 2, 8)[slots], value)

"""Products and chains in C++ against plain numpy, for every kind of weights and instruction set."""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

pytest.importorskip("octavo.attention._cpu")

from octavo.ops import reference
from octavo.ops.errors import IsaUnavailable, ShapeError
from octavo.ops.linear import ISAS, SCRATCH, Chain, LinearEngine, PackedLinear, Step, linear
from octavo.ops.packing import KINDS, StoredMatrix
from tests.ops.cases import SHAPES, random_rows, random_weights

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 25, 47, 96, 130)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def error_of(found: torch.Tensor, wanted: np.ndarray, size: np.ndarray) -> float:
    """Largest difference, in parts of what the sum of magnitudes makes possible."""
    return float((np.abs(found.numpy() - wanted) / (size + 1e-30)).max())


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_the_reference(isa: str, kind: str, threads: int) -> None:
    """Every shape and number of rows, to float32's rounding of sums; and packed weights read back exactly."""
    engine = LinearEngine(isa)
    draw = random.Random(f"{isa}{kind}")
    shapes = (*SHAPES, (5, 33), (100, 7)) if kind == "float32" else SHAPES
    for seed, (outputs, inputs) in enumerate(shapes, draw.randrange(1000)):
        weights = random_weights(kind, outputs, inputs, seed)
        bias = np.random.default_rng(seed).standard_normal(outputs).astype(np.float32)
        packed = PackedLinear(weights, bias)
        ids = torch.randint(outputs, (20,))
        assert np.array_equal(packed.rows(ids).numpy(), weights.dequantised()[ids])
        for rows in draw.sample(ROWS, 5):
            x = random_rows(rows, inputs, seed)
            found = linear(engine, torch.from_numpy(x), packed)
            size = np.abs(x) @ np.abs(weights.dequantised()).T + np.abs(bias)
            assert error_of(found, reference.product(x, weights, bias), size) < 1e-5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company(isa: str, kind: str) -> None:
    """A row alone, at either end of every number of rows up to 256, and on one and two threads."""
    engine = LinearEngine(isa)
    weights = PackedLinear(random_weights(kind, 70, 192, 3))
    rows = torch.from_numpy(random_rows(256, 192, 8))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([linear(engine, row[None], weights) for row in rows])
        for count in (*range(1, 30), 64, 95, 96, 97, 192, 255, 256):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                assert torch.equal(linear(engine, rows[:count], weights), alone[:count])
                assert torch.equal(linear(engine, rows[-count:], weights), alone[-count:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 60, 110])
def test_chain_is_a_decoder_layer(isa: str, kind: str, rows: int, threads: int) -> None:
    """Output projection and MLP with residuals, then the next layer's projection, in one call.

    Inputs of each product are taken from the chain itself, so that a rounding that falls the other way does
    not count as an error of the next product.
    """
    hidden_size, inner, wide = 96, 160, 100
    engine = LinearEngine(isa)
    out_w, gate_up_w, down_w, qkv_w = (
        random_weights(kind, n, k, 11 + 2 * i)
        for i, (n, k) in enumerate(
            ((hidden_size, 64), (2 * inner, hidden_size), (hidden_size, inner), (wide, hidden_size))
        )
    )
    bias = np.random.default_rng(1).standard_normal(2 * inner).astype(np.float32)
    norm = torch.rand(hidden_size) + 0.5
    out, gate_up, down, qkv = (
        PackedLinear(out_w),
        PackedLinear(gate_up_w, bias, paired=True),
        PackedLinear(down_w),
        PackedLinear(qkv_w),
    )
    steps = [
        Step(out, 0, 1, then="add"),
        Step(gate_up, 1, SCRATCH, norm, 1e-5, "swiglu"),
        Step(down, SCRATCH, 1, then="add"),
        Step(qkv, 1, 2, norm, 1e-5),
    ]
    attention = torch.from_numpy(random_rows(rows, 64, rows))
    start = torch.from_numpy(random_rows(rows, hidden_size, rows + 1))
    hidden, result = start.clone(), torch.empty(rows, wide)
    Chain(engine, steps).run(attention, hidden, result)

    # The same, product by product.
    after = start.clone()
    Chain(engine, [steps[0]]).run(attention, after)
    wanted = start.numpy() + reference.product(attention.numpy(), out_w)
    np.testing.assert_allclose(after.numpy(), wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    inside = torch.empty(rows, inner)
    Chain(engine, [Step(gate_up, 0, 1, norm, 1e-5, "swiglu")]).run(after, inside)
    normed = reference.rms_norm(after.numpy(), norm.numpy(), 1e-5)
    wanted = reference.silu_times(reference.product(normed, gate_up_w, bias))
    # A rounding on the edge may fall either way: one step of an activation.
    slack = 2e-2 if kind != "float32" else 1e-4
    np.testing.assert_allclose(inside.numpy(), wanted, rtol=1e-3, atol=slack * np.abs(wanted).max())
    Chain(engine, [Step(down, 0, 1, then="add")]).run(inside, after)
    assert torch.equal(after, hidden)
    again = torch.empty(rows, wide)
    Chain(engine, [Step(qkv, 0, 1, norm, 1e-5)]).run(after, again)
    assert torch.equal(again, result)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_no_numbers_stay_in_their_row(isa: str, kind: str) -> None:
    """A NaN or infinity makes its own row not finite, and changes no bit of another."""
    engine = LinearEngine(isa)
    weights = PackedLinear(random_weights(kind, 40, 64, 5))
    clean = torch.from_numpy(random_rows(11, 64, 2))
    wanted = linear(engine, clean, weights)
    for bad in (torch.nan, torch.inf, -torch.inf):
        rows = clean.clone()
        rows[4, 33] = bad
        found = linear(engine, rows, weights)
        others = [i for i in range(11) if i != 4]
        assert torch.equal(found[others], wanted[others])
        assert not found[4].isfinite().any()
        if kind != "float32":
            assert found[4].isnan().all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "float32"])
@pytest.mark.parametrize("inputs", [32, 480, 576])
def test_groups_of_every_sort_are_rounded_side_by_side(isa: str, kind: str, inputs: int) -> None:
    """NaN, infinite, tiny, zero and huge groups at random places: each row as if it were alone, and exact."""
    engine, rng = LinearEngine(isa), np.random.default_rng(inputs)
    weights = random_weights(kind, 40, inputs, inputs)
    packed = PackedLinear(weights)
    for rows in (6, 11, 25):
        groups = random_rows(rows, inputs, rows).reshape(rows, -1, 32)
        groups[rng.random(groups.shape[:2]) < 0.1] *= np.float32(1e-33)
        groups[rng.random(groups.shape[:2]) < 0.1] *= np.float32(1e30)
        bad = rng.random(rows) < 0.4
        for row in np.flatnonzero(bad):
            at = rng.integers(groups.shape[1]), rng.integers(32)
            groups[row, *at] = rng.choice([np.nan, np.inf, -np.inf])
        x = groups.reshape(rows, inputs)
        found = linear(engine, torch.from_numpy(x), packed).numpy()
        alone = [linear(engine, torch.from_numpy(row[None]), packed).numpy()[0] for row in x]
        assert np.array_equal(found, np.stack(alone), equal_nan=True)
        assert np.isnan(found[bad]).all()
        good = x[~bad]
        size = np.abs(good) @ np.abs(weights.dequantised()).T
        assert error_of(torch.from_numpy(found[~bad]), reference.product(good, weights), size) < 1e-5


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_finish(isa: str, kind: str, threads: int) -> None:
    """Store, add and silu(gate) * up, with a bias and without, where the last tile is whole and where not."""
    engine = LinearEngine(isa)
    for outputs, rows, biased in ((64, 5, True), (64, 31, False), (94, 7, True), (30, 12, False)):
        stored = random_weights(kind, outputs, 96, outputs)
        bias = np.random.default_rng(rows).standard_normal(outputs).astype(np.float32) if biased else None
        x = random_rows(rows, 96, rows)
        x /= 1 + np.abs(x).max(-1, keepdims=True)
        plain = linear(engine, torch.from_numpy(x), PackedLinear(stored, bias))
        added = torch.ones(rows, outputs)
        Chain(engine, [Step(PackedLinear(stored, bias), 0, 1, then="add")]).run(torch.from_numpy(x), added)
        assert torch.equal(added, plain + 1)
        gated = torch.full((rows, outputs // 2), torch.nan)
        paired = PackedLinear(stored, bias, paired=True)
        Chain(engine, [Step(paired, 0, 1, then="swiglu")]).run(torch.from_numpy(x), gated)
        wanted = reference.silu_times(plain.numpy().astype(np.float64))
        np.testing.assert_allclose(gated.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_tiny_and_huge_groups(isa: str) -> None:
    """Groups below 1e-30 count as zero; 1e30 is rounded like any other."""
    engine = LinearEngine(isa)
    weights = random_weights("q8_0", 8, 96, 3)
    x = random_rows(1, 96, 3)
    x[0, :32] = 1e-31
    x[0, 32:64] *= 1e30
    found = linear(engine, torch.from_numpy(x), PackedLinear(weights))
    wanted = reference.product(x, weights)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_largest_products_do_not_overflow(isa: str) -> None:
    """All weights and activations at their ends, -128 among them: exact sums."""
    engine = LinearEngine(isa)
    for kind in ("q8_0", "q4_0", "q4_1"):
        blocks = random_weights(kind, 4, 64, 1).rows.reshape(4, 2, -1).copy()
        head = 4 if kind == "q4_1" else 2
        blocks[..., :head] = np.full(head // 2, 1, np.float16).view(np.uint8)
        blocks[:2, :, head:] = 0xFF if kind != "q8_0" else 0x7F
        blocks[2:, :, head:] = 0x00 if kind != "q8_0" else 0x80
        weights = StoredMatrix(kind, blocks.reshape(4, -1))
        for sign in (127.0, -127.0):
            x = np.full((3, 64), sign, np.float32)
            found = linear(engine, torch.from_numpy(x), PackedLinear(weights))
            assert np.array_equal(found.numpy(), reference.product(x, weights)), (kind, sign)


def test_strided_rows() -> None:
    """Tensors that are columns of wider ones are read and written in place."""
    engine = LinearEngine()
    weights = PackedLinear(random_weights("q4_1", 40, 64, 5))
    wide, target = torch.randn(9, 200), torch.full((9, 90), 7.0)
    Chain(engine, [Step(weights, 0, 1)]).run(wide[:, 50:114], target[:, 20:60])
    assert torch.equal(target[:, 20:60], linear(engine, wide[:, 50:114].contiguous(), weights))
    assert (target[:, :20] == 7).all()
    assert (target[:, 60:] == 7).all()


def test_what_does_not_fit_is_refused() -> None:
    """Wrong shapes, dtypes, layouts, ids and chains are named before anything is written."""
    engine = LinearEngine()
    weights = PackedLinear(random_weights("q8_0", 40, 64, 5))
    pair = PackedLinear(random_weights("q8_0", 40, 64, 5), paired=True)
    chain, out = Chain(engine, [Step(weights, 0, 1)]), torch.empty(3, 40)
    for x in (torch.randn(3, 63), torch.randn(3, 64).double(), torch.randn(64, 3).T, torch.randn(4, 64)):
        with pytest.raises(ShapeError, match=r"tensor [01] is torch"):
            chain.run(x, out)
    with pytest.raises(ShapeError, match=r"ids -1\.\.3 for a table of 40"):
        weights.rows(torch.tensor([3, -1]))
    with pytest.raises(ShapeError, match="int64"):
        weights.rows(torch.tensor([3.0]))
    with pytest.raises(ShapeError, match="not paired"):
        Chain(engine, [Step(weights, 0, 1, then="swiglu")])
    with pytest.raises(ShapeError, match="64 inputs after scratch of 20"):
        Chain(engine, [Step(pair, 0, SCRATCH, then="swiglu"), Step(weights, SCRATCH, 1)])
    with pytest.raises(ShapeError, match="begins empty"):
        Chain(engine, [Step(weights, 0, SCRATCH, then="add")])
    with pytest.raises(ShapeError, match="tensor 1 has 40 columns in one step and 64"):
        Chain(engine, [Step(weights, 0, 1), Step(weights, 1, 0)])
    with pytest.raises(ShapeError, match="norm of shape"):
        Chain(engine, [Step(weights, 0, 1, torch.ones(3))])
    with pytest.raises(ShapeError, match="bias of shape"):
        PackedLinear(random_weights("q8_0", 40, 64, 5), np.zeros(3))
    with pytest.raises(IsaUnavailable, match="sse1"):
        LinearEngine("sse1")


def test_two_threads_may_share_an_engine() -> None:
    """Concurrent calls wait for each other and give the bits of calls in turn."""
    engine = LinearEngine()
    weights = PackedLinear(random_weights("q4_1", 200, 576, 5))
    inputs = [torch.from_numpy(random_rows(20, 576, seed)) for seed in range(4)]
    want = [linear(engine, x, weights) for x in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            if not torch.equal(linear(engine, inputs[index], weights), want[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_forked_process_has_threads_of_its_own() -> None:
    """A child forked after the parent has used its threads computes the same, and does not wait for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = LinearEngine()
        weights = PackedLinear(random_weights("q4_1", 1000, 576, 5))
        x = torch.from_numpy(random_rows(3, 576, 1))
        want = linear(engine, x, weights)

        def work() -> None:
            raise SystemExit(0 if torch.equal(linear(engine, x, weights), want) else 1)

        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        child.join(60)
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(before)

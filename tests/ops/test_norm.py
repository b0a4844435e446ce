"""RMSNorm, residual and SwiGLU against float64, and what must change no bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from octavo.ops import ISAS, OpsError, add_rms_norm, rms_norm, swiglu
from octavo.ops import norm as norm_module
from octavo.ops.norm import rms_norm_torch, swiglu_torch

KINDS = ISAS or (None,)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEP = {
    torch.float32: 1e-6,
    torch.bfloat16: 4.1e-3,
    torch.float16: 5.1e-4,
}  # half a unit in the last place, or more
WIDTHS = (1, 5, 16, 31, 32, 33, 64, 100, 576, 2048)
EPS = 1e-5


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within one rounding to the dtype of `got`, and float16's smallest steps."""
    step = STEP[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=step, atol=1e-6 if step < 1e-5 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_equal_float64_and_each_other(width: int, dtype: torch.dtype) -> None:
    """With and without residual: float64 to one rounding, and the same bits on every instruction set."""
    x, delta = (random(7, width, dtype=dtype, seed=seed, size=3) for seed in (1, 2))
    weight = random(width, dtype=dtype, seed=3)
    results = []
    for isa in KINDS:
        hidden = x.clone()
        got = add_rms_norm(hidden, delta, weight, EPS, isa=isa)
        assert torch.equal(hidden, x + delta)
        assert torch.equal(got, rms_norm(hidden, weight, EPS, isa=isa))
        close(got, rms_norm_torch(hidden.double(), weight.double(), EPS))
        results.append(got)
    assert all(torch.equal(got, results[0]) for got in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_swiglu_equals_float64(width: int, dtype: torch.dtype) -> None:
    """silu(gate) * up to one rounding; the result is gate's place, and up is left as it was."""
    gate_up = random(7, 2 * width, dtype=dtype, seed=4, size=4)
    want = swiglu_torch(gate_up.double())
    for isa in KINDS:
        given = gate_up.clone()
        got = swiglu(given, isa=isa)
        close(got, want)
        assert torch.equal(given[:, width:], gate_up[:, width:])


@pytest.mark.parametrize("isa", KINDS)
def test_large_gates_neither_overflow_nor_vanish(isa: str | None) -> None:
    """Gates of hundreds give gate * up or nothing; NaN stays NaN."""
    gate = torch.tensor([-3e38, -500.0, -89.0, -20.0, 0.0, 20.0, 500.0, 3e38, float("nan")])
    got = swiglu(torch.cat((gate, torch.ones(9)))[None], isa=isa)[0]
    torch.testing.assert_close(got[3:8], torch.tensor([-4.1223e-8, 0, 20, 500, 3e38]), rtol=1e-4, atol=1e-12)
    assert got[:3].abs().max() < 1e-5
    assert got[8].isnan()


@pytest.mark.parametrize("isa", KINDS)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_threads(isa: str | None) -> None:
    """1 row, or 2,100 of them on 1 to 3 threads: rows alone decide."""
    x, delta = (random(2100, 576, dtype=torch.float32, seed=seed) for seed in (5, 6))
    weight, gate_up = (
        random(576, dtype=torch.float32, seed=7),
        random(2100, 1152, dtype=torch.float32, seed=8),
    )
    rows = (0, 1, 1023, 2099)
    alone = [
        add_rms_norm(x[row : row + 1].clone(), delta[row : row + 1], weight, EPS, isa=isa) for row in rows
    ]
    alone_gated = [swiglu(gate_up[row : row + 1].clone(), isa=isa) for row in rows]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        together = add_rms_norm(x.clone(), delta, weight, EPS, isa=isa)
        gated = swiglu(gate_up.clone(), isa=isa)
        for row, norm, out in zip(rows, alone, alone_gated):
            assert torch.equal(together[row], norm[0])
            assert torch.equal(gated[row], out[0])


@pytest.mark.parametrize("isa", KINDS)
def test_heads_cut_out_of_a_larger_tensor_are_normed_in_place(isa: str | None) -> None:
    """[T, H, D] inside qkv: only those heads change, to what a dense copy gives."""
    qkv, weight = random(5, 9, 20, dtype=torch.float32, seed=9), random(20, dtype=torch.float32, seed=10)
    before = qkv.clone()
    rms_norm(qkv[:, 2:6], weight, EPS, out=qkv[:, 2:6], isa=isa)
    assert torch.equal(qkv[:, 2:6], rms_norm(before[:, 2:6].contiguous(), weight, EPS, isa=isa))
    assert torch.equal(qkv[:, :2], before[:, :2])
    assert torch.equal(qkv[:, 6:], before[:, 6:])


def test_no_rows_give_no_rows() -> None:
    """An empty batch is no error."""
    empty, weight = torch.empty(0, 16), torch.ones(16)
    assert add_rms_norm(empty, empty.clone(), weight, EPS).shape == (0, 16)
    assert swiglu(torch.empty(0, 32)).shape == (0, 16)


def test_what_does_not_fit_is_refused() -> None:
    """Shapes and dtypes that differ, an odd gate_up, an unknown instruction set."""
    x, weight = torch.zeros(2, 8), torch.ones(8)
    for call in (
        lambda: rms_norm(x, weight[:4], EPS),
        lambda: rms_norm(x, weight.half(), EPS),
        lambda: rms_norm(x[0], weight, EPS),
        lambda: rms_norm(x, weight, EPS, out=torch.zeros(2, 9)),
        lambda: add_rms_norm(x, torch.zeros(3, 8), weight, EPS),
        lambda: add_rms_norm(x, x.half(), weight, EPS),
        lambda: swiglu(torch.zeros(2, 7)),
        lambda: rms_norm(x, weight, EPS, isa="mmx"),
    ):
        with pytest.raises(OpsError):
            call()


def test_without_kernels_torch_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler: the same results to rounding, by torch."""
    monkeypatch.setattr(norm_module, "kernels", lambda isa: None)
    x, delta, weight = (random(*shape, dtype=torch.float32, seed=1) for shape in ((4, 64), (4, 64), (64,)))
    hidden = x.clone()
    close(
        add_rms_norm(hidden, delta, weight, EPS), rms_norm_torch((x + delta).double(), weight.double(), EPS)
    )
    assert torch.equal(hidden, x + delta)
    out = torch.empty_like(x)
    assert rms_norm(x, weight, EPS, out=out) is out
    close(swiglu(x), swiglu_torch(x.double()))


def test_float64_goes_through_torch() -> None:
    """A dtype that the kernels do not take keeps its precision."""
    x, weight = random(3, 40, dtype=torch.float64), random(40, dtype=torch.float64, seed=1)
    want = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, EPS), want, rtol=1e-12, atol=1e-12)

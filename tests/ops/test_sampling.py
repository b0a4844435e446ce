"""Sampling without a sort against sampling with one: the same tokens, exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from octavo.ops import ISAS, OpsError, Pick, candidates, sample
from octavo.ops import sampling as sampling_module
from octavo.ops.sampling import uniform
from octavo.ops.sorting import candidates_by_sorting, pick_by_sorting, weights_of

KINDS = ISAS or (None,)
SHAPES = ("normal", "coarse", "masked", "flat", "spiked", "steps")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_logits(kind: str, vocab: int, generator: torch.Generator, draw: random.Random) -> torch.Tensor:
    """One row: of many ties, with masked tokens, with all equal, peaked, or far from 0."""
    row = torch.randn(vocab, generator=generator) * draw.choice((0.1, 1, 3, 10))
    if kind == "coarse":
        return row.round()
    if kind == "masked":
        row[torch.rand(vocab, generator=generator) < 0.7] = -torch.inf
        row[draw.randrange(vocab)] = 0.0
        return row
    if kind == "flat":
        return torch.full((vocab,), draw.choice((-1e30, -3.0, 0.0, 1e30)))
    if kind == "spiked":
        row[draw.randrange(vocab)] += 40
    if kind == "steps":
        return (row * 4).round() / 4 - 500
    return row


def make_pick(vocab: int, draw: random.Random) -> Pick:
    return Pick(
        row=0,
        temperature=draw.choice((1e-5, 1e-3, 0.2, 0.7, 1.0, 1.0, 1.7, 50.0, 1e30)),
        top_k=draw.choice((0, 0, 1, 5, 50, 900, vocab - 1, vocab, 10**9)),
        top_p=draw.choice((1.0, 1.0, 0.95, 0.9, 0.5, 1e-9, 1 - 1e-6, 1 - 2**-53)),
        min_p=draw.choice((0.0, 0.0, 0.1, 0.5, 1e-9, 1e-300, 1.0)),
        seed=draw.getrandbits(64),
        branch=draw.randrange(4),
        position=draw.randrange(2**40),
    )


def check(logits: torch.Tensor, pick: Pick) -> None:
    """Candidates, their shares and the token are those of the full sort, on every instruction set."""
    row = logits.numpy()
    found = candidates_by_sorting(row, pick)
    assert found is not None
    ids, weights = found
    token, likeliest = pick_by_sorting(row, pick), pick_by_sorting(row, pick._replace(temperature=0.0))
    for isa in KINDS:
        got, shares = candidates(logits, pick, isa=isa)
        assert np.array_equal(got.numpy(), ids), (isa, pick)
        assert np.array_equal(shares.numpy(), weights / float(weights.sum())), (isa, pick)
        assert sample(logits[None], [pick, pick._replace(temperature=0.0)], isa=isa) == [token, likeliest]


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("vocab", [1, 2, 15, 100, 1023, 1024, 1025, 5000])
def test_tokens_equal_those_of_a_full_sort(vocab: int, kind: str) -> None:
    """Random filters over rows with ties, masks and peaks: exactly the same set and the same token."""
    draw, generator = random.Random(f"{vocab} {kind}"), torch.Generator().manual_seed(vocab)
    for _ in range(25):
        check(make_logits(kind, vocab, generator, draw), make_pick(vocab, draw))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("vocab", [49_152, 128_256])
def test_tokens_of_real_vocabularies_equal_those_of_a_full_sort(vocab: int, kind: str) -> None:
    """The same at 49,152 and 128,256 tokens."""
    draw, generator = random.Random(f"{vocab} {kind}"), torch.Generator().manual_seed(vocab)
    for _ in range(5):
        check(make_logits(kind, vocab, generator, draw), make_pick(vocab, draw))


def test_ties_at_the_cut_go_to_lower_ids() -> None:
    """Equal logits at the boundary of top_k and of top_p: the lower ids stay."""
    logits = torch.zeros(3000)
    logits[7] = 1.0
    for pick, want in (
        (Pick(0, top_k=3), [0, 1, 7]),
        (Pick(0, top_p=4.0 / (2999 + np.e)), [0, 1, 7]),
        (Pick(0, top_k=3, min_p=0.9), [7]),
    ):
        for isa in KINDS:
            assert candidates(logits, pick, isa=isa)[0].tolist() == want


def test_weights_are_those_of_softmax() -> None:
    """The whole-number weights agree with e^x in float64 to float32's precision, and 0 is exact."""
    x = np.concatenate((np.linspace(-27.9, 0, 100_001), [-28.001, -1e5, -np.inf])).astype(np.float32)
    got, want = weights_of(x, 1.0) / 2.0**40, np.exp(x.astype(np.float64))
    assert np.all(np.abs(got - want) <= 1e-6 * want + 2.0**-40)
    assert got[100_000] == 1
    assert np.all(got[100_001:] == 0)


def test_rows_of_one_call_are_as_if_alone_on_any_threads() -> None:
    """96 picks over 12 rows, several per row: each token is the one it gets alone."""
    draw, generator = random.Random(1), torch.Generator().manual_seed(1)
    logits = torch.stack([make_logits(draw.choice(SHAPES), 30_000, generator, draw) for _ in range(12)])
    before = logits.clone()
    picks = [make_pick(30_000, draw)._replace(row=draw.randrange(12)) for _ in range(96)]
    picks[::5] = [pick._replace(temperature=0.0) for pick in picks[::5]]
    alone = [sample(logits[pick.row : pick.row + 1], [pick._replace(row=0)])[0] for pick in picks]
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert sample(logits, picks) == alone
    assert torch.equal(logits, before)
    wide = torch.cat((logits, logits), dim=1)[:, :30_000]  # rows apart in memory
    assert sample(wide, picks) == alone


def test_random_numbers_are_numpys_philox() -> None:
    """With all weights equal the token shows the number: the kernel's is that of numpy's generator."""
    vocab, draw = 2**16, random.Random(2)
    logits = torch.zeros(1, vocab)
    keys = [
        (0, 0, 0),
        (2**64 - 1, 7, 2**40),
        *((draw.getrandbits(64), draw.getrandbits(16), n) for n in range(200)),
    ]
    for isa in KINDS:
        tokens = sample(logits, [Pick(0, seed=s, branch=i, position=p) for s, i, p in keys], isa=isa)
        assert tokens == [int(uniform(*key) * vocab) for key in keys]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_says_nothing_gives_no_token(value: float) -> None:
    """One NaN or +infinity, or -infinity everywhere, gives -1 for that row, and the others their tokens."""
    for place in (0, 999, 1023, 1024, 1999):
        logits = torch.randn(3, 2000)
        logits[1, place] = value
        if value == -float("inf"):
            logits[1] = value
        for isa in KINDS:
            for pick in (Pick(1), Pick(1, temperature=0.0), Pick(1, top_k=5), Pick(1, top_p=0.5)):
                first, bad, last = sample(logits, [Pick(0), pick, Pick(2)], isa=isa)
                assert (first, bad, last) == (*sample(logits, [Pick(0)]), -1, *sample(logits, [Pick(2)]))
            with pytest.raises(OpsError):
                candidates(logits[1], Pick(0), isa=isa)
        assert pick_by_sorting(logits[1].numpy(), Pick(0)) == -1


def test_what_does_not_fit_is_refused() -> None:
    """Another dtype, no row, a row outside, greedy candidates, an empty or immense vocabulary."""
    good = torch.zeros(2, 8)
    for logits, pick in (
        (good.double(), Pick(0)),
        (good[0], Pick(0)),
        (good, Pick(2)),
        (good, Pick(-1)),
        (torch.zeros(1, 0), Pick(0)),
        (torch.zeros(1, 1).expand(1, 2**22 + 1), Pick(0)),
    ):
        with pytest.raises(OpsError):
            sample(logits, [pick])
    with pytest.raises(OpsError, match="temperature"):
        candidates(good[0], Pick(0, temperature=0.0))
    assert sample(good, []) == []


def test_without_kernels_the_sort_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiler samples the same tokens, more slowly."""
    draw, logits = random.Random(3), torch.randn(4, 500)
    picks = [make_pick(500, draw)._replace(row=n % 4) for n in range(40)]
    want = sample(logits, picks), [candidates(logits[0], pick) for pick in picks]
    monkeypatch.setattr(sampling_module, "kernels", lambda isa: None)
    assert sample(logits, picks) == want[0]
    for pick, (ids, shares) in zip(picks, want[1]):
        got = candidates(logits[0], pick)
        assert torch.equal(got[0], ids)
        assert torch.equal(got[1], shares)
    assert sample(torch.full((1, 5), float("nan")), [Pick(0)]) == [-1]

"""What the compiled backend refuses, before it reads anything; and what it shares with torch."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

pytest.importorskip("octavo.attention._cpu")

from attention_cases import make_case

from octavo.attention import (
    BackendUnavailable,
    BatchError,
    LayerCache,
    backend_note,
    make_backend,
)
from octavo.attention.cpu import ISAS, CpuBackend

SHAPES = [(1, 9), (6, 6), (2, 11)]  # rows at queries 0:1, 1:7, 7:9; block size 4: blocks 3 + 2 + 3


def case_with(name: str, index: tuple[int, ...] | int, value: int):
    """A valid case with one number of its batch changed."""
    case = make_case(SHAPES, block_size=4, group=2, head_dim=16)
    tensor = getattr(case.batch, name).clone()
    tensor[index] = value
    case.batch = replace(case.batch, **{name: tensor})
    return case


def attend(case, backend: CpuBackend | None = None, **options):
    """Run the case with scale 1."""
    return (backend or CpuBackend()).paged_attention(case.query, case.cache, case.batch, scale=1.0, **options)


@pytest.mark.parametrize(
    ("name", "index", "value", "words", "row", "position"),
    [
        ("tables", (0, 0), -1, "row 0: the block at position 0 is -1; the pool has blocks 0..10", 0, 0),
        ("tables", (0, 2), 11, "row 0: the block at position 8 is 11", 0, 8),
        ("tables", (2, 1), 2**31 - 1, "row 2: the block at position 4", 2, 4),
        ("kv_len", 2, 17, "row 2: kv_len is 17; its table has room for 16", 2, 16),
        ("kv_len", 1, 5, "row 1: 6 queries, .* is 5", 1, 5),
        ("kv_len", 1, -1, "row 1: 6 queries, .* is -1", 1, -1),
        ("query_start", 0, 1, "is 1; it must be 0", 0, 0),
        ("query_start", 2, 10, "row 2: query_start falls from 10 to 9", 2, 3),
        ("query_start", 3, 8, "ends at 8; there are 9 tokens", 2, 3),
    ],
)
def test_a_batch_that_points_elsewhere_is_named(
    name: str, index: tuple[int, ...] | int, value: int, words: str, row: int, position: int
) -> None:
    """Checked mode names the sequence and the position, and computes nothing."""
    with pytest.raises(BatchError, match=words) as caught:
        attend(case_with(name, index, value))
    assert (caught.value.row, caught.value.position) == (row, position)


def test_blocks_past_kv_len_do_not_matter() -> None:
    """Row 1 uses two blocks, so its third entry may be anything."""
    plain = attend(make_case(SHAPES, block_size=4, group=2, head_dim=16))
    assert torch.equal(attend(case_with("tables", (1, 2), 10**6)), plain)


@pytest.mark.parametrize("slot", [-1, 8])
def test_a_slot_outside_the_cache_writes_nothing(slot: int) -> None:
    """The error names the token and the slot; tokens before it are not written either."""
    cache = LayerCache(torch.zeros(2, 4, 1, 16), torch.zeros(2, 4, 1, 16))
    rows = torch.ones(2, 1, 16)
    with pytest.raises(BatchError, match=rf"token 1: slot {slot} is outside the pool's 0\.\.7") as caught:
        CpuBackend().write_kv(rows, rows, cache, torch.tensor([0, slot]))
    assert caught.value.position == 1
    assert not cache.key.any()


def test_shapes_and_dtypes_are_always_checked() -> None:
    """Each wrong tensor raises a typed error that names it, checked mode or not."""
    case = make_case(SHAPES, block_size=4, group=2, head_dim=16)
    batch, heads, free = case.batch, case.query.shape[1], CpuBackend(checked=False)
    bad_batches = [
        ("tables", replace(batch, tables=batch.tables.long())),
        ("query_start", replace(batch, query_start=batch.query_start.long())),
        ("query_start", replace(batch, query_start=batch.query_start[:-1])),
        ("kv_len", replace(batch, kv_len=batch.kv_len[:-1])),
    ]
    for name, bad in bad_batches:
        with pytest.raises(BatchError, match=name):
            free.paged_attention(case.query, case.cache, bad, scale=1.0)
    for query in (case.query.double(), case.query[:, :, :8], case.query[0]):
        with pytest.raises(BatchError, match="query is"):
            free.paged_attention(query, case.cache, batch, scale=1.0)
    with pytest.raises(BatchError, match=r"3 query heads .* 2 KV heads"):
        free.paged_attention(case.query[:, :3], case.cache, batch, scale=1.0)
    with pytest.raises(BatchError, match="window 0"):
        attend(case, free, window=0)
    with pytest.raises(BatchError, match="sinks has shape"):
        attend(case, free, sinks=torch.zeros(heads + 1))
    with pytest.raises(BatchError, match="alibi has shape"):
        attend(case, free, alibi=torch.zeros(heads, 1))
    with pytest.raises(BatchError, match="key has shape"):
        free.write_kv(case.query, case.query, case.cache, batch.slots)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (LayerCache(torch.zeros(2, 4, 1, 300), torch.zeros(2, 4, 1, 300)), "at most 256"),
        (LayerCache(torch.zeros(2, 4, 1, 16).double(), torch.zeros(2, 4, 1, 16).double()), "float64"),
        (LayerCache(torch.zeros(2, 4, 1, 16), torch.zeros(2, 4, 1, 8)), "key has shape"),
        (LayerCache(torch.zeros(2, 16, 1, 4).transpose(1, 3), torch.zeros(2, 4, 1, 16)), "strides"),
        (LayerCache(torch.zeros(2, 4, 1, 16), torch.zeros(2, 16, 1, 4).transpose(1, 3)), "strides"),
        (LayerCache(*[torch.zeros(2, 4, 1, 16, dtype=torch.int8)] * 2), "key_scale"),
    ],
)
def test_a_cache_that_kernels_cannot_read_is_refused(cache: LayerCache, words: str) -> None:
    """Dtype, shape, strides and scales of a layer are checked when it is first used."""
    rows = torch.zeros(1, 1, cache.key.shape[3])
    with pytest.raises(BatchError, match=words):
        CpuBackend().write_kv(rows, rows, cache, torch.tensor([0]))


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    """The typed error lists what the machine has."""
    with pytest.raises(BackendUnavailable, match="baseline"):
        CpuBackend(isa="avx1024")
    assert ISAS[-1] == "baseline"


def test_auto_takes_the_compiled_backend() -> None:
    """Both names give it, and the note for the start-up table says which instructions."""
    assert isinstance(make_backend(), CpuBackend)
    assert isinstance(make_backend("cpu"), CpuBackend)
    assert backend_note() == f"cpu ({ISAS[0]})"


def test_without_the_extension_auto_takes_the_reference() -> None:
    """An installation without compiled kernels works, says why, and refuses "cpu" by a typed error."""
    script = """
import sys
sys.modules["octavo.attention._cpu"] = None
from octavo.attention import BackendUnavailable, backend_note, make_backend
assert make_backend().name == "reference"
assert backend_note().startswith("reference (compiled kernels are not available")
try:
    make_backend("cpu")
except BackendUnavailable as error:
    assert error.name == "cpu" and error.reason
else:
    raise AssertionError("cpu was made")
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_one_openmp_runtime_is_mapped() -> None:
    """The kernels have threads of their own and bring no second OpenMP runtime beside torch's."""
    attend(make_case([(1, 3000)] * 4, block_size=16, group=3, head_dim=64))
    with open("/proc/self/maps") as maps:
        found = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line}
    assert len(found) == 1, found


def test_two_threads_may_share_a_backend() -> None:
    """Concurrent calls wait for each other and give the bits of calls in turn."""
    backend = CpuBackend()
    cases = [make_case([(1, 700), (20, 90)], block_size=16, group=3, head_dim=64, seed=s) for s in range(4)]
    want = [attend(case, backend) for case in cases]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(30):
            if not torch.equal(attend(cases[index], backend), want[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

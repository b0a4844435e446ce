"""Faults that other engines shipped, each as its whole kind, on every backend and instruction set.

Loops over queries and heads in float64 that share no code with the package decide.
"""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, Shape, make_case, naive_attention

from octavo.attention import AttentionBackend, ReferenceBackend

BACKENDS: dict[str, AttentionBackend] = {"reference": ReferenceBackend()}
try:
    from octavo.attention.cpu import ISAS, CpuBackend
except ImportError:  # no compiler: the reference alone
    pass
else:
    BACKENDS |= {isa: CpuBackend(isa=isa) for isa in ISAS}


def written(backend: AttentionBackend, shapes: list[Shape], block_size: int, group: int) -> Case:
    """A case whose keys and values the backend itself wrote, token by slot, into a cache of its own."""
    case = make_case(shapes, block_size=block_size, group=group, head_dim=32, num_kv_heads=2, seed=block_size)
    blocks = case.cache.num_blocks
    cache = backend.allocate(blocks, block_size, 2, 32, torch.float32)
    for row, (_, kv_len) in enumerate(shapes):
        at = torch.arange(kv_len)
        slots = case.batch.tables[row, at // block_size].long() * block_size + at % block_size
        backend.write_kv(case.keys[row], case.values[row], cache, slots)
    case.cache = cache
    return case


def check(backend: AttentionBackend, case: Case) -> None:
    """Fail unless every row is within 1e-5 of the loops."""
    want, _ = naive_attention(case, scale=32**-0.5)
    out = backend.paged_attention(case.query, case.cache, case.batch, scale=32**-0.5)
    assert isinstance(out, torch.Tensor)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 12, 16])
def test_any_group_size_at_prefill_and_decode(group: int, name: str) -> None:
    """D28: group sizes that are no power of two, for whole prompts, single tokens, and both at once."""
    for shapes in ([(17, 17)], [(1, 17), (1, 1), (1, 64)], [(17, 17), (1, 40), (5, 33)]):
        check(BACKENDS[name], written(BACKENDS[name], shapes, 16, group))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_every_row_of_a_batch_is_right(block_size: int, name: str) -> None:
    """D32: lengths 1 to 9 in one batch, as prompts and as decodes, not the first row alone."""
    check(BACKENDS[name], written(BACKENDS[name], [(n, n) for n in range(1, 10)], block_size, 3))
    check(BACKENDS[name], written(BACKENDS[name], [(1, n) for n in range(1, 10)], block_size, 3))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_queries_that_start_after_cached_keys(block_size: int, name: str) -> None:
    """D33: chunks of several lengths at offset 0, one block, one block and 3, each with its context."""
    for offset in (0, block_size, block_size + 3):
        shapes = [(queries, offset + queries) for queries in (1, 2, 7, 20)]
        check(BACKENDS[name], written(BACKENDS[name], shapes, block_size, 2))

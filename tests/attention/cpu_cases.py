"""What the tests of the compiled backend share: batches, options, caches in every stored dtype."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from attention_cases import Case, Shape, make_case

from octavo.attention import LayerCache, dense_reference
from octavo.attention.cpu import ISAS, CpuBackend
from octavo.attention.quant import quantize

BLOCK_SIZES = (1, 2, 7, 16, 64, 256)
GROUPS = (1, 2, 3, 5, 6, 7, 8, 12, 16)
HEAD_DIMS = (16, 20, 64, 72, 80, 128, 256)
OPTIONS = ("plain", "window", "softcap", "sinks", "alibi", "all")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
KINDS = ("prefill", "chunk at 0", "chunk at bs", "chunk at bs+3", "decode", "mixed", "long")
TOLERANCE = 1e-5
PAIRS = "avx512bf16"
"""Rounds queries and weights to bfloat16 where the cache holds that, and is "avx512" in all else."""


def shapes_of(kind: str, block_size: int) -> list[Shape]:
    """(queries, kv_len) rows of a kind of batch; "long" crosses splits and tiles, and has idle rows."""
    bs = block_size
    return {
        "prefill": [(9, 9), (bs + 1, bs + 1), (70, 70)],
        "chunk at 0": [(6, 6)],
        "chunk at bs": [(5, bs + 5)],
        "chunk at bs+3": [(5, bs + 3 + 5)],
        "decode": [(1, 1), (1, bs), (1, bs + 1), (1, 2 * bs + 3)],
        "mixed": [(1, bs + 2), (4, 4), (1, 1), (3, bs + 3), (1, 2 * bs)],
        "long": [(1, 512), (1, 513), (40, 700), (0, 9), (1, 1500), (0, 0), (3, 1027)],
    }[kind]


def options_of(name: str, num_heads: int, window: int = 6) -> dict[str, Any]:
    """Keyword arguments that turn one option on, or all of them."""
    generator = torch.Generator().manual_seed(100)
    every = {
        "window": window,
        "softcap": 1.5,
        "sinks": torch.randn(num_heads, generator=generator),
        "alibi": torch.rand(num_heads, generator=generator),
    }
    if name == "plain":
        return {}
    return every if name == "all" else {name: every[name]}


def make_stored_case(shapes: list[Shape], dtype: torch.dtype, **rest: Any) -> Case:
    """make_case in any stored dtype; in int8 with the rows of `quantize`, and `fill` for unused scales."""
    if dtype != torch.int8:
        return make_case(shapes, dtype=dtype, **rest)
    fill = rest.get("fill", math.nan)
    case = make_case(shapes, **{**rest, "fill": 0.0})
    used = torch.zeros(case.cache.key.shape[:2], dtype=torch.bool)
    for row, (_, kv_len) in enumerate(shapes):
        at = torch.arange(kv_len)
        used[case.batch.tables[row, at // used.shape[1]].long(), at % used.shape[1]] = True
    stored: list[torch.Tensor] = []
    for rows in (case.cache.key, case.cache.value):
        values, scale = quantize(rows)
        values[~used], scale[~used] = 77, fill
        stored += [values, scale]
    case.cache = LayerCache(stored[0], stored[2], stored[1], stored[3])
    return case


def in_lanes(cache: LayerCache) -> LayerCache:
    """A copy that lies in lanes; the block size must be whole vectors."""
    lanes = LayerCache.allocate(*cache.key.shape, cache.key.dtype, lanes=True)
    for new, old in zip(lanes.tensors(), cache.tensors(), strict=True):
        new.copy_(old)
    return lanes


def run(backend: CpuBackend, case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the case."""
    scale = case.query.shape[-1] ** -0.5
    return backend.paged_attention(
        case.query, case.cache, case.batch, scale=scale, return_lse=True, **options
    )


def exactness(case: Case, isa: str) -> tuple[torch.Tensor, float]:
    """The queries as an instruction set takes them, and how far from float64 its results may be.

    Where pairs of bfloat16 are multiplied, each weight is off by at most 2^-9 of itself, and so is their
    sum; an output, which is a mean of values, by twice that of the largest.
    """
    if isa != PAIRS or case.cache.key.dtype != torch.bfloat16:
        return case.query, TOLERANCE
    scale = case.query.shape[-1] ** -0.5
    used = case.cache.value[~case.cache.value.isnan()]
    return (case.query.float() * scale).bfloat16().double() / scale, 2.0**-8 * max(
        1.0, float(used.abs().max())
    )


def check_against_oracle(case: Case, options: dict[str, Any]) -> None:
    """Fail unless out and lse are as near to dense float64 as they promise, for every instruction set."""
    scale = case.query.shape[-1] ** -0.5
    lanes = in_lanes(case.cache) if case.cache.block_size % 16 == 0 else None
    for isa in ISAS:
        query, tolerance = exactness(case, isa)
        want, want_lse = dense_reference(
            query, case.cache, case.batch, scale=scale, compute_dtype=torch.float64, **options
        )
        backend = CpuBackend(isa=isa)
        out, lse = run(backend, case, **options)
        if lanes is not None:
            again, again_lse = run(backend, dataclasses.replace(case, cache=lanes), **options)
            assert torch.equal(again, out), isa
            assert torch.equal(again_lse, lse), isa
        alone = backend.paged_attention(case.query, case.cache, case.batch, scale=scale, **options)
        assert torch.equal(alone, out), isa
        torch.testing.assert_close(out.double(), want, rtol=0, atol=tolerance)
        torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=tolerance)

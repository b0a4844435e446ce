"""What paged attention costs beside a plain read of the same bytes, contiguous sequences, and torch.

    decode    block size x dtype x context x batch x group, one thing changed at a time
    grid      the same rows over every combination of given lists
    blocks    block sizes 1 to 256
    prefill   one prompt, causal, against torch's attention on contiguous tensors
    prefix    16 sequences over one shared prefix, read once and read by each: with 3 KV heads as in SmolLM2
              135M, whose prefix a last-level cache may hold, and with 8, in groups of 3 and, as in Llama 3.2
              1B, of 4, whose it may not
    write     rotating queries and keys and storing keys and values, in one pass and in two
    calls     time of a call with next to nothing to do
    error     outputs over each stored dtype against float64 on what was stored

Each part yields rows of plain numbers, named by their keys; cli/bench.py prints them. All things that are
compared run in turn, and the fastest run of each counts, because the machine may be shared. "read" is
torch's sum over the same K and V, seen as float32: the bandwidth that a plain read reaches in the same
seconds. Caches are used in turn with copies, enough that none is still in the processor's cache when its
turn comes. "flat" is the same kernel and layout where each sequence's blocks lie in order, one contiguous
stretch of memory per sequence; "one" is it with one block for the whole sequence, which lies as rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, product

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention import AttentionBatch, LayerCache, ReferenceBackend, dense_reference
from octavo.attention.cpu import CpuBackend
from octavo.attention.quant import quantize
from octavo.attention.rotate import rotate_in_place
from octavo.bench.timing import Timed, race

KV_HEADS, HEAD_DIM, GROUP = 3, 64, 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
SCALE = HEAD_DIM**-0.5
COLD = 200e6  # bytes of copies: several times a last-level cache
REFERENCE = ReferenceBackend()

Backend = CpuBackend | ReferenceBackend
Row = dict[str, object]


def make_caches(
    blocks: int, block_size: int, dtype: torch.dtype, backend: Backend, kv_heads: int = KV_HEADS
) -> list[LayerCache]:
    """Caches of random rows as the backend lays them out, COLD bytes of them and at least two."""
    cache = backend.allocate(blocks, block_size, kv_heads, HEAD_DIM, dtype)
    for stored, scale in ((cache.key, cache.key_scale), (cache.value, cache.value_scale)):
        rows = torch.randn(stored.shape)
        if scale is not None:
            rows, scales = quantize(rows)
            scale.copy_(scales)
        stored.copy_(rows)
    caches = [cache]
    while len(caches) < 2 or len(caches) * megabytes(cache) * 1e6 < COLD:
        caches.append(cache.like(blocks))
        for new, old in zip(caches[-1].stretches(), cache.stretches(), strict=True):
            new.copy_(old)
    return caches


def make_batch(
    batch: int, context: int, block_size: int, queries: int, *, shared: int = 0, shuffled: bool = True
) -> AttentionBatch:
    """Sequences of `context`, the first `shared` tokens of which are the same blocks."""
    columns, prefix = -(-context // block_size), shared // block_size
    count = prefix + batch * (columns - prefix)
    order = (torch.randperm(count) if shuffled else torch.arange(count)).to(torch.int32)
    tables = torch.cat((order[:prefix].expand(batch, -1), order[prefix:].view(batch, -1)), dim=1)
    return AttentionBatch(
        tables=tables,
        query_start=torch.arange(batch + 1, dtype=torch.int32) * queries,
        kv_len=torch.full((batch,), context, dtype=torch.int32),
        slots=torch.zeros(batch * queries, dtype=torch.int64),
    )


def attend(backend: Backend, query: Tensor, caches: list[LayerCache], batch: AttentionBatch) -> Timed:
    """A call per run, on the caches in turn."""
    turn = cycle(caches)
    return lambda: backend.paged_attention(query, next(turn), batch, scale=SCALE)


def read(caches: list[LayerCache]) -> Timed:
    """A plain read per run of a cache's K and V, in turn."""
    turn = cycle([[stored.view(-1).view(torch.float32) for stored in cache.stretches()] for cache in caches])
    return lambda: [stored.sum() for stored in next(turn)]


def megabytes(cache: LayerCache) -> float:
    """Of K, V and scales."""
    return sum(stored.numel() * stored.element_size() for stored in cache.tensors()) / 1e6


def torch_decode(batch: int, context: int, group: int, dtype: torch.dtype) -> Timed:
    """torch's attention of one query per sequence on contiguous tensors."""
    dtype = torch.float32 if dtype == torch.int8 else dtype
    turn = cycle([torch.randn(2, batch, KV_HEADS, context, HEAD_DIM).to(dtype) for _ in range(2)])
    query = torch.randn(batch, KV_HEADS * group, 1, HEAD_DIM).to(dtype)

    def run() -> None:
        key, value = next(turn)
        F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return run


def torch_prefill(query: Tensor, key: Tensor, value: Tensor) -> Timed:
    """torch's causal attention of one prompt on contiguous tensors [1, heads, tokens, dim]."""
    dense = query.transpose(0, 1)[None].contiguous()
    return lambda: F.scaled_dot_product_attention(dense, key, value, is_causal=True, enable_gqa=True)


def decode_row(
    backend: CpuBackend,
    seconds: float,
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    context: int = 4096,
    batch: int = 8,
    group: int = GROUP,
) -> Row:
    """One query per sequence. torch has no int8 and then runs on float32."""
    caches = make_caches(batch * -(-context // block_size), block_size, dtype, backend)
    query = torch.randn(batch, KV_HEADS * group, HEAD_DIM)
    paged, flat = (make_batch(batch, context, block_size, 1, shuffled=shuffled) for shuffled in (True, False))
    whole = make_caches(batch, context, dtype, REFERENCE), make_batch(batch, context, context, 1)
    best = race(
        seconds,
        {
            "read": read(caches),
            "paged": attend(backend, query, caches, paged),
            "flat": attend(backend, query, caches, flat),
            "one": attend(backend, query, *whole),
            "torch": torch_decode(batch, context, group, dtype),
        },
    )
    size = megabytes(caches[0])
    return {
        "block_size": block_size,
        "dtype": str(dtype)[6:],
        "context": context,
        "batch": batch,
        "group": group,
        "ms": best["paged"] * 1e3,
        "megabytes": size,
        "gigabytes_per_second": size / best["paged"] / 1e3,
        "read_gigabytes_per_second": size / best["read"] / 1e3,
        "share_of_read": best["read"] / best["paged"],
        "paged_over_flat": best["paged"] / best["flat"],
        "paged_over_one": best["paged"] / best["one"],
        "torch_over_paged": best["torch"] / best["paged"],
    }


def decode(backend: CpuBackend, seconds: float) -> Iterator[Row]:
    """One thing changes at a time around block 16, float32, context 4,096, batch 8, group 3."""
    for dtype in DTYPES:
        yield decode_row(backend, seconds, dtype=dtype)
    for context in (256, 1024, 16384):
        yield decode_row(backend, seconds, context=context)
    for batch in (1, 32):
        yield decode_row(backend, seconds, batch=batch)
    for group in (1, 2, 4, 8):
        yield decode_row(backend, seconds, group=group)


def grid(
    backend: CpuBackend,
    seconds: float,
    *,
    block_sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    contexts: Sequence[int],
    batches: Sequence[int],
    groups: Sequence[int],
) -> Iterator[Row]:
    """Rows of decode for every combination."""
    for block_size, dtype, context, batch, group in product(block_sizes, dtypes, contexts, batches, groups):
        yield decode_row(
            backend, seconds, block_size=block_size, dtype=dtype, context=context, batch=batch, group=group
        )


def blocks(backend: CpuBackend, seconds: float) -> Iterator[Row]:
    """The block-size curve."""
    for dtype in (torch.float32, torch.float16):
        for block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            yield decode_row(backend, seconds, block_size=block_size, dtype=dtype)


def prefill(backend: CpuBackend, seconds: float) -> Iterator[Row]:
    """One prompt: paged, the reference backend, torch with grouped heads and with heads repeated.

    Queries, and torch's tensors, are float32, whatever the cache holds.
    """
    for dtype, tokens in product((torch.float32, torch.bfloat16), (128, 512, 2048, 8192)):
        caches, rows = (make_caches(tokens // 16, 16, dtype, each)[:1] for each in (backend, REFERENCE))
        batch, query = make_batch(1, tokens, 16, tokens), torch.randn(tokens, KV_HEADS * GROUP, HEAD_DIM)
        key, value = torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM)
        runners = {
            "paged": attend(backend, query, caches, batch),
            "reference": attend(REFERENCE, query, rows, batch),
            "grouped": torch_prefill(query, key, value),
            "repeated": torch_prefill(query, *(each.repeat_interleave(GROUP, 1) for each in (key, value))),
        }
        best = race(seconds, runners)
        work = 2 * tokens * (tokens + 1) * KV_HEADS * GROUP * HEAD_DIM  # two products, half the square
        yield {
            "dtype": str(dtype)[6:],
            "tokens": tokens,
            "ms": best["paged"] * 1e3,
            "gigaflops": work / best["paged"] / 1e9,
            "reference_over_paged": best["reference"] / best["paged"],
            "torch_grouped_over_paged": best["grouped"] / best["paged"],
            "torch_repeated_over_paged": best["repeated"] / best["paged"],
        }


def prefix(backend: CpuBackend, seconds: float) -> Iterator[Row]:
    """16 sequences with a shared prefix and 64 tokens of their own, shared reading on and off."""
    apart = CpuBackend(isa=backend.isa, share=False)
    for length, dtype, kv_heads, group in (
        (8192, torch.float32, KV_HEADS, GROUP),
        (8192, torch.float16, KV_HEADS, GROUP),
        (2048, torch.float32, KV_HEADS, GROUP),
        (512, torch.float32, KV_HEADS, GROUP),
        (8192, torch.float32, 8, 3),
        (8192, torch.float32, 8, 4),
        (8192, torch.float16, 8, 4),
    ):
        context, query = length + 64, torch.randn(16, kv_heads * group, HEAD_DIM)
        caches = make_caches((length + 16 * 64) // 16, 16, dtype, backend, kv_heads)
        batch = make_batch(16, context, 16, 1, shared=length)
        best = race(
            seconds,
            {"once": attend(backend, query, caches, batch), "each": attend(apart, query, caches, batch)},
        )
        yield {
            "prefix": length,
            "dtype": str(dtype)[6:],
            "kv_heads": kv_heads,
            "group": group,
            "prefix_megabytes": megabytes(caches[0]) * length / (length + 16 * 64),
            "once_ms": best["once"] * 1e3,
            "each_ms": best["each"] * 1e3,
            "gain": best["each"] / best["once"],
        }


def calls(backend: CpuBackend, seconds: float) -> Iterator[Row]:
    """A decode step of 4 short sequences, with its plan made and with it kept."""
    caches, rows = (make_caches(64, 16, torch.float32, each)[:1] for each in (backend, REFERENCE))
    query, batch = torch.randn(4, KV_HEADS * GROUP, HEAD_DIM), make_batch(4, 16, 16, 1)
    key, value, slots = *torch.randn(2, 4, KV_HEADS, HEAD_DIM), torch.arange(4)

    def planned() -> None:
        batch.derived.clear()
        backend.paged_attention(query, caches[0], batch, scale=SCALE)

    best = race(
        seconds,
        {
            "paged_attention": attend(backend, query, caches, batch),
            "paged_attention and plan": planned,
            "paged_attention, reference": attend(REFERENCE, query, rows, batch),
            "write_kv": lambda: backend.write_kv(key, value, caches[0], slots),
            "write_kv, reference": lambda: REFERENCE.write_kv(key, value, rows[0], slots),
        },
    )
    for name, time_taken in best.items():
        yield {"call": name, "microseconds": time_taken * 1e6}


def write(backend: CpuBackend, seconds: float) -> Iterator[Row]:
    """One layer's queries and keys rotated, and its keys and values stored: in one pass, and in two steps
    (torch's rotation of queries and keys, which lie side by side, then write_kv)."""
    for tokens, dtype in product((1, 64, 2048), (torch.float32, torch.int8)):
        cache, slots = make_caches(256, 16, dtype, backend)[0], torch.randperm(4096)[:tokens]
        qkv = torch.randn(tokens, KV_HEADS * (GROUP + 2), HEAD_DIM)
        query, key, value = qkv.tensor_split((KV_HEADS * GROUP, KV_HEADS * (GROUP + 1)), dim=1)
        angles = torch.randn(tokens, 1, HEAD_DIM // 2)
        cos, sin = angles.cos(), angles.sin()
        best = race(
            seconds,
            {
                "one": partial(backend.rotate_and_write_kv, query, key, value, cos, sin, cache, slots),
                "rotate": partial(rotate_in_place, qkv[:, :-KV_HEADS], cos, sin),
                "write": partial(backend.write_kv, key, value, cache, slots),
            },
        )
        two = best["rotate"] + best["write"]
        yield {
            "tokens": tokens,
            "dtype": str(dtype)[6:],
            "one_pass_us": best["one"] * 1e6,
            "two_steps_us": two * 1e6,
            "gain": two / best["one"],
        }


def error(backend: CpuBackend, _seconds: float) -> Iterator[Row]:
    """4 sequences of standard normal K and V and queries: what each stored dtype loses."""
    for context in (256, 4096):
        batch = make_batch(4, context, 16, 1)
        exact = make_caches(4 * context // 16, 16, torch.float32, REFERENCE)[0]
        query = torch.randn(4, KV_HEADS * GROUP, HEAD_DIM)
        want, _ = dense_reference(query, exact, batch, scale=SCALE, compute_dtype=torch.float64)
        rows = [each.reshape(-1, KV_HEADS, HEAD_DIM) for each in (exact.key, exact.value)]
        for dtype in DTYPES:
            cache = backend.allocate(exact.num_blocks, 16, KV_HEADS, HEAD_DIM, dtype)
            backend.write_kv(rows[0], rows[1], cache, torch.arange(len(rows[0])))
            out = backend.paged_attention(query, cache, batch, scale=SCALE)
            assert isinstance(out, Tensor)  # no lse was asked for
            lost = out.double() - want
            yield {
                "dtype": str(dtype)[6:],
                "context": context,
                "largest_error": float(lost.abs().max()),
                "relative_error": float(lost.norm() / want.norm()),
            }


PARTS = {
    "decode": decode,
    "blocks": blocks,
    "prefill": prefill,
    "prefix": prefix,
    "write": write,
    "calls": calls,
    "error": error,
}

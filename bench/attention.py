"""What paged attention costs beside a plain read of the same bytes, one contiguous block, and torch.

    python -m bench.attention [decode] [blocks] [prefill] [prefix] [calls] [--seconds 1.5] [--isa avx2]

All things that are compared run in turn, over and over, for `--seconds` per row; the fastest run of each
counts, because the machine may be shared. "read" is torch's sum over the same K and V, seen as float32:
the bandwidth that a plain read reaches in the same seconds. Caches are used in turn with copies, enough
that none is still in the processor's cache when its turn comes. Prints one table per part:

    decode    block size x dtype x context x batch x group: share of the read, and times against the same
              kernel on contiguous sequences, blocks in order ("paged/flat"), and torch's attention ("torch")
    blocks    block sizes 1 to 256, all else as in the middle row
    prefill   one prompt, causal, against torch's attention on contiguous tensors
    prefix    16 sequences over one shared prefix, read once and read by each
    calls     time of a call with next to nothing to do
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention import AttentionBatch, LayerCache, ReferenceBackend
from octavo.attention.cpu import CpuBackend
from octavo.attention.quant import quantize

KV_HEADS, HEAD_DIM, GROUP = 3, 64, 3
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
SCALE = HEAD_DIM**-0.5
COLD = 200e6  # bytes of copies: several times a last-level cache
REFERENCE = ReferenceBackend()

Timed = Callable[[], object]
Backend = CpuBackend | ReferenceBackend


def race(seconds: float, runners: dict[str, Timed]) -> dict[str, float]:
    """The fastest run of each in seconds, all run in turn for so many seconds in all."""
    best = dict.fromkeys(runners, float("inf"))
    for runner in runners.values():
        runner()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, runner in runners.items():
            begin = time.perf_counter()
            runner()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def make_caches(blocks: int, block_size: int, dtype: torch.dtype, backend: Backend) -> list[LayerCache]:
    """Caches of random rows as the backend lays them out, COLD bytes of them and at least two."""
    cache = backend.allocate(blocks, block_size, KV_HEADS, HEAD_DIM, dtype)
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
    columns = -(-context // block_size)
    order = torch.randperm(batch * columns) if shuffled else torch.arange(batch * columns)
    tables = order.view(batch, columns).to(torch.int32)
    tables[:, : shared // block_size] = tables[0, : shared // block_size]
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
) -> None:
    """One line of the decode table."""
    caches = make_caches(batch * context // block_size, block_size, dtype, backend)
    query = torch.randn(batch, KV_HEADS * group, HEAD_DIM)
    paged, flat = (make_batch(batch, context, block_size, 1, shuffled=shuffled) for shuffled in (True, False))
    best = race(
        seconds,
        {
            "read": read(caches),
            "paged": attend(backend, query, caches, paged),
            "flat": attend(backend, query, caches, flat),
            "torch": torch_decode(batch, context, group, dtype),
        },
    )
    size = megabytes(caches[0])
    print(
        f"{block_size:5} {str(dtype)[6:]:>9} {context:7} {batch:5} {group:5} {best['paged'] * 1e3:8.3f} "
        f"{size:8.1f} {size / best['paged'] / 1e3:7.1f} {best['read'] / best['paged']:6.0%} "
        f"{best['paged'] / best['flat']:10.2f} {best['torch'] / best['paged']:7.1f}x",
        flush=True,
    )


DECODE_HEADER = "block     dtype context batch group       ms       MB    GB/s   read paged/flat   torch"


def decode(backend: CpuBackend, seconds: float) -> None:
    """The decode table: one thing changes at a time around block 16, context 4,096, batch 8, group 3."""
    print(DECODE_HEADER)
    for dtype in DTYPES:
        decode_row(backend, seconds, dtype=dtype)
    for context in (256, 1024, 16384):
        decode_row(backend, seconds, context=context)
    for batch in (1, 32):
        decode_row(backend, seconds, batch=batch)
    for group in (1, 2, 4, 8):
        decode_row(backend, seconds, group=group)


def blocks(backend: CpuBackend, seconds: float) -> None:
    """The block-size curve."""
    print(DECODE_HEADER)
    for dtype in (torch.float32, torch.float16):
        for block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            decode_row(backend, seconds, block_size=block_size, dtype=dtype)


def prefill(backend: CpuBackend, seconds: float) -> None:
    """One prompt: paged, the reference backend, torch with grouped heads and with heads repeated."""
    print("tokens       ms   GFLOP/s  reference  torch (grouped)  torch (repeated)")
    for tokens in (128, 512, 2048, 8192):
        caches, rows = (
            make_caches(tokens // 16, 16, torch.float32, each)[:1] for each in (backend, REFERENCE)
        )
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
        ratios = "".join(
            f"{best[name] / best['paged']:{width}.2f}x"
            for name, width in (("reference", 9), ("grouped", 16), ("repeated", 17))
        )
        print(f"{tokens:6} {best['paged'] * 1e3:8.3f} {work / best['paged'] / 1e9:9.0f} {ratios}", flush=True)


def prefix(backend: CpuBackend, seconds: float) -> None:
    """16 sequences with a shared prefix and 64 tokens of their own, shared reading on and off."""
    print("prefix     dtype   once ms  each ms   gain")
    apart = CpuBackend(isa=backend.isa, share=False)
    for length, dtype in (
        (8192, torch.float32),
        (8192, torch.float16),
        (2048, torch.float32),
        (512, torch.float32),
    ):
        context, query = length + 64, torch.randn(16, KV_HEADS * GROUP, HEAD_DIM)
        caches = make_caches(context, 16, dtype, backend)
        batch = make_batch(16, context, 16, 1, shared=length)
        best = race(
            seconds,
            {"once": attend(backend, query, caches, batch), "each": attend(apart, query, caches, batch)},
        )
        print(
            f"{length:6} {str(dtype)[6:]:>9} {best['once'] * 1e3:9.3f} {best['each'] * 1e3:8.3f} "
            f"{best['each'] / best['once']:5.2f}x",
            flush=True,
        )


def calls(backend: CpuBackend, seconds: float) -> None:
    """Microseconds of a call: a decode step of 4 short sequences, with its plan made and with it kept."""
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
        print(f"{name:28} {time_taken * 1e6:7.1f} us")


PARTS = {"decode": decode, "blocks": blocks, "prefill": prefill, "prefix": prefix, "calls": calls}


def main() -> None:
    """Parse the command line and run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all when none is given")
    parser.add_argument("--seconds", type=float, default=1.5, help="per row of a table")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--isa", help="default: the fastest of this machine")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    backend = CpuBackend(isa=options.isa)
    print(f"{backend.isa}, {torch.get_num_threads()} threads, {KV_HEADS} KV heads of {HEAD_DIM}")
    for name in options.parts or PARTS:
        print(f"\n{name}")
        PARTS[name](backend, options.seconds)


if __name__ == "__main__":
    main()

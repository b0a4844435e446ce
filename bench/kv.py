"""What each operation of octavo.kv.Pool costs, at pools of 1e3 to 1e6 blocks.

    python -m bench.kv [--pools 1000 10000 100000 1000000] [--rounds 200]

Every pool is first filled with cached blocks of unrelated prompts, so that its tree and its eviction
order are as large as they get; 64 blocks stay free. An operation is timed alone, in a state made for
it and undone after, both untimed; the first tenth of the rounds warms up, the median of the rest counts.
Prints nanoseconds per call and, after the slash, per block; "growth" is the largest pool's time over the
smallest one's. Past some 1e5 blocks the structures leave the processor's caches, and that shows.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.kv import Pool, Sequence

BLOCK = 16
SPARE = 64  # blocks that stay free
FILLER = 64  # blocks of a filling prompt
LONGEST = 8192
CHUNK = 512  # tokens of reserve, extend and commit

Tokens = npt.NDArray[np.int32]
Timed = Callable[[], Any]


class Operation(NamedTuple):
    """One row of the table: `state(bench)` yields the call to time."""

    name: str
    blocks: int
    state: Callable[[Bench], Any]


class Bench:
    """A full pool, and prompts that nobody has seen."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = Pool(num_blocks, BLOCK)
        self._next = 0
        self.prompt = self.fresh(LONGEST + 1)
        while self.pool.stats().free >= SPARE + FILLER:
            self.compute(self.fresh(FILLER * BLOCK)).close()
        self.compute(self.prompt).close()

    def fresh(self, count: int) -> Tokens:
        """Token ids that share no prefix with any before."""
        self._next += count
        return np.arange(self._next - count, self._next, dtype=np.int32)

    def compute(self, tokens: Tokens) -> Sequence:
        """An open sequence with all of `tokens` committed."""
        seq = self.pool.open(tokens)
        self.grow(seq, tokens[seq.num_cached :])
        return seq

    def grow(self, seq: Sequence, tokens: Tokens) -> None:
        """What an engine's step does: reserve, extend, drain, commit."""
        if not seq.reserve(len(tokens)):
            raise RuntimeError(f"no room for {len(tokens)} tokens in {self.pool.num_blocks} blocks")
        seq.extend(len(tokens))
        self.pool.drain()
        seq.commit(tokens)

    def free_room(self) -> None:
        """Make SPARE blocks free: evict as many, by reserving them and giving them back unwritten."""
        with self.pool.open(self.fresh(1)) as seq:
            seq.reserve(SPARE * BLOCK)

    def no_room(self) -> None:
        """Turn every free block into a cached one."""
        while free := self.pool.stats().free:
            self.compute(self.fresh(min(free, FILLER) * BLOCK)).close()


def opening(tokens: int) -> Callable[[Bench], Any]:
    """open() with a hit of `tokens`."""

    @contextmanager
    def state(bench: Bench) -> Iterator[Timed]:
        opened: list[Sequence] = []
        prompt = bench.prompt[: tokens + 1]
        yield lambda: opened.append(bench.pool.open(prompt))
        assert opened[0].num_cached == tokens
        opened[0].close()

    return state


@contextmanager
def reserving(bench: Bench) -> Iterator[Timed]:
    """reserve(CHUNK) while blocks are free."""
    bench.free_room()
    with bench.pool.open(bench.fresh(CHUNK)) as seq:
        yield lambda: seq.reserve(CHUNK)


@contextmanager
def evicting(bench: Bench) -> Iterator[Timed]:
    """reserve(CHUNK) while none is: every block has to be evicted."""
    bench.no_room()
    with bench.pool.open(bench.fresh(CHUNK)) as seq:
        yield lambda: seq.reserve(CHUNK)


@contextmanager
def extending(bench: Bench) -> Iterator[Timed]:
    """extend(CHUNK) after reserve."""
    with bench.pool.open(bench.fresh(CHUNK)) as seq:
        seq.reserve(CHUNK)
        yield lambda: seq.extend(CHUNK)


@contextmanager
def committing(bench: Bench) -> Iterator[Timed]:
    """commit() of CHUNK new tokens."""
    tokens = bench.fresh(CHUNK)
    with bench.pool.open(tokens) as seq:
        seq.reserve(CHUNK)
        seq.extend(CHUNK)
        yield lambda: seq.commit(tokens)


@contextmanager
def decoding(bench: Bench) -> Iterator[Timed]:
    """reserve(1), extend(1), commit() of one token in the middle of a block."""
    tokens = bench.fresh(CHUNK + BLOCK)
    with bench.compute(tokens[: CHUNK + BLOCK // 2]) as seq:
        yield lambda: bench.grow(seq, tokens[CHUNK + BLOCK // 2 :][:1])


def forking(tokens: int) -> Callable[[Bench], Any]:
    """fork() of a sequence of `tokens`."""

    @contextmanager
    def state(bench: Bench) -> Iterator[Timed]:
        children: list[Sequence] = []
        with bench.compute(bench.prompt[:tokens]) as seq:
            yield lambda: children.append(seq.fork())
            children[0].close()

    return state


@contextmanager
def closing(bench: Bench) -> Iterator[Timed]:
    """close() of a sequence whose blocks nobody else holds and that stay cached."""
    yield bench.compute(bench.fresh(CHUNK)).close


OPERATIONS = (
    *(Operation(f"open, hit of {n:,}", n // BLOCK, opening(n)) for n in (64, 512, 2048, LONGEST)),
    Operation(f"reserve {CHUNK}, free", CHUNK // BLOCK, reserving),
    Operation(f"reserve {CHUNK}, evict", CHUNK // BLOCK, evicting),
    Operation(f"extend {CHUNK}", CHUNK // BLOCK, extending),
    Operation(f"commit {CHUNK}", CHUNK // BLOCK, committing),
    Operation("reserve, extend, commit 1", 1, decoding),
    *(Operation(f"fork {n:,}", n // BLOCK, forking(n)) for n in (CHUNK, LONGEST)),
    Operation(f"close {CHUNK}", CHUNK // BLOCK, closing),
)


def median_ns(bench: Bench, operation: Operation, rounds: int) -> float:
    """The median time of one call, after a tenth more to warm up."""
    times = []
    for _ in range(rounds + rounds // 10):
        with operation.state(bench) as call:
            start = time.perf_counter_ns()
            call()
            times.append(time.perf_counter_ns() - start)
    return statistics.median(times[rounds // 10 :])


def main() -> None:
    """Parse the command line, measure pool by pool, print one row per operation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pools", type=int, nargs="+", default=[1_000, 10_000, 100_000, 1_000_000], help="blocks"
    )
    parser.add_argument("--rounds", type=int, default=200, help="timed calls of each; medians (200)")
    args = parser.parse_args()
    least = LONGEST // BLOCK + 2 * SPARE + FILLER
    if min(args.pools) < least:
        parser.error(f"a pool must have at least {least} blocks for a prompt of {LONGEST} tokens")
    times: dict[str, list[float]] = {operation.name: [] for operation in OPERATIONS}
    gc.disable()
    for num_blocks in args.pools:
        bench = Bench(num_blocks)
        for operation in OPERATIONS:
            if not operation.name.startswith(("open", "fork")):
                times[operation.name].append(median_ns(bench, operation, args.rounds))
                continue
            bench.compute(bench.prompt).close()  # cached again, whatever was evicted since
            times[operation.name].append(median_ns(bench, operation, args.rounds))
    header = "".join(f"{f'{n:,} blocks':>20}" for n in args.pools)
    print(f"ns per call / per block of {BLOCK}\n{'operation':28}{header}{'growth':>9}")
    for operation in OPERATIONS:
        row = times[operation.name]
        cells = "".join(f"{f'{ns:,.0f} / {ns / operation.blocks:,.0f}':>20}" for ns in row)
        print(f"{operation.name:28}{cells}{row[-1] / row[0]:>9.2f}")


if __name__ == "__main__":
    main()

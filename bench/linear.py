"""Products of smollm2's shapes by format and number of rows, beside torch in float32 and a plain read.

    python -m bench.linear [--threads 1 2] [--rows 1 4 16 64 256 1024] [--isa avx2]

Each shape has enough copies of its weights that the caches hold few of them, and takes them in turn. Prints
microseconds, GOP/s (two operations a product) and GB/s of weights, medians of three.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the commands do, before torch is imported

import torch
from rich.console import Console
from rich.table import Table

from octavo.ops.linear import ISAS, Chain, LinearEngine, PackedLinear, Step
from octavo.ops.packing import KINDS, quantised

SHAPES = {"q|k|v": (960, 576), "output": (576, 576), "gate|up": (3072, 576), "down": (576, 1536)}
COPIES_BYTES = 96 * 2**20
SECONDS = 0.05


def median_time(call: Callable[[], object]) -> float:
    """Seconds of one call, the median of three stretches."""
    call()
    start = time.perf_counter()
    call()
    count = max(3, min(500, int(SECONDS / max(time.perf_counter() - start, 1e-6))))
    stretches = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            call()
        stretches.append((time.perf_counter() - start) / count)
    return statistics.median(stretches)


def in_turn(calls: list[Callable[[], object]]) -> Callable[[], object]:
    """A call that makes the next of `calls`."""
    turn = itertools.cycle(calls)
    return lambda: next(turn)()


def packed_calls(engine: LinearEngine, weights: np.ndarray, kind: str, x: torch.Tensor) -> tuple[float, int]:
    """Seconds of a product with weights of a kind, and their bytes."""
    stored = quantised(weights, kind)
    size = PackedLinear(stored).num_bytes
    copies = [PackedLinear(stored) for _ in range(max(2, COPIES_BYTES // size))]
    out = torch.empty(len(x), stored.outputs)
    chains = [Chain(engine, [Step(copy, 0, 1)]) for copy in copies]
    return median_time(in_turn([lambda chain=chain: chain.run(x, out) for chain in chains])), size


def torch_calls(weights: np.ndarray, x: torch.Tensor) -> tuple[float, int]:
    """Seconds of torch's product in float32, and the weights' bytes."""
    copies = [torch.from_numpy(weights.copy()) for _ in range(max(2, COPIES_BYTES // weights.nbytes))]
    calls = [lambda w=copy: torch.nn.functional.linear(x, w) for copy in copies]
    return median_time(in_turn(calls)), weights.nbytes


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--isa", choices=ISAS, default=ISAS[0])
    args = parser.parse_args()
    engine, rng = LinearEngine(args.isa), np.random.default_rng(0)
    table = Table("threads", "matrix", "weights", "rows", "us", "GOP/s", "GB/s", "x torch", title=args.isa)
    for threads, name in itertools.product(args.threads, args.shapes):
        torch.set_num_threads(threads)
        outputs, inputs = SHAPES[name]
        weights = rng.standard_normal((outputs, inputs)).astype(np.float32)
        for rows in args.rows:
            x = torch.randn(rows, inputs)
            base, size = torch_calls(weights, x)
            found = {"torch float32": (base, size)}
            for kind in KINDS:
                found[kind] = packed_calls(engine, weights, kind, x)
            for kind, (seconds, size) in found.items():
                work = 2e-9 * rows * outputs * inputs / seconds
                cells = [f"{seconds * 1e6:.1f}", f"{work:.0f}", f"{size / seconds / 1e9:.1f}"]
                table.add_row(str(threads), name, kind, str(rows), *cells, f"{base / seconds:.2f}")
    Console(width=100).print(table)
    big = torch.ones(2**26)
    for threads in args.threads:
        torch.set_num_threads(threads)
        seconds = median_time(lambda: big.sum())
        print(f"plain read, {threads} threads: {big.nbytes / seconds / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()

"""What norms, SwiGLU and sampling cost beside torch and a plain read of the same bytes.

    python -m bench.ops [--threads 1] [--seconds 0.3] [--json FILE]

What is compared runs in turn, over and over, for `--seconds` per row, and the fastest run of each counts.
Microseconds. "read" is torch's sum over what the operation reads. "torch" is what the operation replaces: in
sampling a softmax, sort and cumulative sum per row, as any sampler in torch has to do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.bench.timing import race
from octavo.ops import Pick, add_rms_norm, sample, swiglu

EPS = 1e-5
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
    "top_k 2000": {"top_k": 2000},
}


def torch_sample(row: Tensor, given: dict[str, float]) -> int:
    """One token with torch's operations: filters by sorting, then the inverse of the distribution."""
    if given.get("temperature") == 0:
        return int(row.argmax())
    scaled = row - row.max()
    order: Tensor | None = None
    if "top_k" in given:
        scaled, order = scaled.topk(int(given["top_k"]))
    elif "top_p" in given:
        scaled, order = scaled.sort(descending=True, stable=True)
    probs = scaled.softmax(dim=-1, dtype=torch.float64)
    if "top_p" in given:
        probs = torch.where(probs.cumsum(dim=-1) - probs < given["top_p"], probs, 0.0)
    if "min_p" in given:
        probs = torch.where(probs >= given["min_p"] * probs.max(), probs, 0.0)
    cumulative = probs.cumsum(dim=-1)
    at = min(int(torch.searchsorted(cumulative, 0.5 * cumulative[-1], right=True)), len(probs) - 1)
    return int(order[at]) if order is not None else at


def norms(seconds: float) -> Iterator[dict[str, object]]:
    """Residual and RMSNorm, and SwiGLU, at the widths of a model of 135M and of one of 1B parameters."""
    for width, inner in ((576, 1536), (2048, 8192)):
        for tokens in (1, 8, 64, 512, 2048):
            x, delta, weight = torch.randn(tokens, width), torch.zeros(tokens, width), torch.randn(width)

            def plain(x: Tensor = x, delta: Tensor = delta, weight: Tensor = weight) -> Tensor:
                x += delta
                return F.rms_norm(x, weight.shape, weight, EPS)

            runners = {
                "read": lambda: (x.sum(), delta.sum()),  # noqa: B023
                "torch": plain,
                "ops": lambda: add_rms_norm(x, delta, weight, EPS),  # noqa: B023
            }
            yield row_of("residual + norm", f"{tokens} x {width}", race(seconds, runners))
            # Gates of 30 make a product with 1 that stays what it is: the operation works in place.
            both = torch.cat((torch.full((tokens, inner), 30.0), torch.ones(tokens, inner)), dim=1)

            def gated(both: Tensor = both) -> Tensor:
                gate, up = both.chunk(2, dim=-1)
                return F.silu(gate).mul_(up)

            runners = {"read": lambda: both.sum(), "torch": gated, "ops": lambda: swiglu(both)}  # noqa: B023
            yield row_of("SwiGLU", f"{tokens} x {inner}", race(seconds, runners))


def sampling(seconds: float) -> Iterator[dict[str, object]]:
    """Filters over two vocabularies: a peak of 50 tokens over normal logits, of two widths."""
    for vocab in (49_152, 128_256):
        for batch in (1, 8, 64):
            for spread in (1.0, 3.0):
                logits = torch.randn(batch, vocab) * spread
                logits[:, :50] += 5 * spread * torch.rand(batch, 50)
                for name, given in FILTERS.items():
                    picks = [Pick(i, **given) for i in range(batch)]  # type: ignore[arg-type]
                    runners = {
                        "read": lambda: logits.sum(),  # noqa: B023
                        "torch": lambda: [torch_sample(row, given) for row in logits],  # noqa: B023
                        "ops": lambda: sample(logits, picks),  # noqa: B023
                    }
                    shape = f"{batch} x {vocab}, spread {spread:g}"
                    yield row_of(name, shape, race(seconds, runners))


def row_of(name: str, shape: str, best: dict[str, float]) -> dict[str, object]:
    return {"operation": name, "shape": shape, **{key: value * 1e6 for key, value in best.items()}}


def main() -> None:
    """Parse the command line and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.3, help="per row")
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    print(f"{torch.get_num_threads()} threads, microseconds")
    print(f"{'operation':20} {'shape':24} {'read':>9} {'torch':>10} {'ops':>9} {'torch/ops':>9}")
    with torch.inference_mode():
        for part in (norms, sampling):
            for row in part(options.seconds):
                rows.append(row)
                read, plain, ours = (float(str(row[key])) for key in ("read", "torch", "ops"))
                print(
                    f"{row['operation']:20} {row['shape']:24} {read:9.1f} {plain:10.1f} {ours:9.1f} "
                    f"{plain / ours:8.1f}x",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

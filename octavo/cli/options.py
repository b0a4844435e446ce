"""Options that commands share, and how they become an EngineConfig and SamplingParams.

A number out of range is refused here, by the option's name, before anything is loaded.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.engine.params import SamplingParams

DEFAULT_MODEL = "smollm2"
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", *DTYPES, "int8")
WEIGHTS = ("auto", "float32", "int8", "int4")
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: a whole number from `low` to `high`, both included."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text[:40]}")
        return value

    return parse


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """An argparse type: a finite number from `low` to `high`; `above` excludes `low` itself."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from None
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            start = f"above {low:g}" if above else f"at least {low:g}"
            end = "" if high == math.inf else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"must be {start}{end}, not {text[:40]}")
        return value

    return parse


def add_model(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=DEFAULT_MODEL,
        help="what to load: a directory in Hugging Face form, a .gguf file, a name on the Hugging Face hub, "
        f"or {DEFAULT_MODEL}, a small model that `make setup` installs (default: %(default)s)",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options of the engine: number formats, memory, how much runs at once, and what it does to be faster."""
    group = parser.add_argument_group(
        "engine options",
        "The KV cache, which keeps what was computed for each token, is divided into blocks of a few tokens. "
        "How many blocks there are decides how many requests can run at once and how long they may be.",
    )
    _add_formats(group)
    _add_memory(group)
    _add_batch(group)
    _add_speculation(group)
    _add_lower_tiers(group)
    _add_scheduling(group)
    _add_machine(group)


def _add_formats(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="number format to compute in (default: %(default)s)",
    )
    group.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="auto",
        help="format of the weights: auto keeps a GGUF file's four- and eight-bit ones as they are stored, "
        "and floats as floats; float32 computes in full; int8 and int4 round (default: %(default)s)",
    )
    group.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="number format of the KV cache; float16 holds twice and int8 nearly four times the tokens of "
        "float32 in the same memory, at some loss of precision (default: %(default)s, that of --dtype, or "
        "sixteen bits where weights are quantised)",
    )
    group.add_argument(
        "--block-size",
        type=whole_number(1, 256),
        metavar="TOKENS",
        help="tokens in one block of the KV cache, 1 to 256 (default: chosen, and shown at start)",
    )


def _add_memory(group: argparse._ArgumentGroup) -> None:
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--num-blocks",
        type=whole_number(1, INT32_MAX),
        metavar="N",
        help="blocks in the KV cache (default: as many as --kv-memory holds)",
    )
    size.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="memory for the KV cache, such as 512MiB or 8GiB, or auto: what the machine can spare "
        "(default: 2GiB)",
    )


def _add_batch(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-num-seqs",
        type=whole_number(1, 65536),
        default=64,
        metavar="N",
        help="most sequences computed in one step; more wait their turn (default: %(default)s)",
    )
    group.add_argument(
        "--max-batched-tokens",
        type=whole_number(1, 2**24),
        default=2048,
        metavar="TOKENS",
        help="most tokens computed in one step; longer prompts take several (default: %(default)s)",
    )
    group.add_argument(
        "--max-model-len",
        type=whole_number(1, INT32_MAX),
        metavar="TOKENS",
        help="longest prompt and answer together (default: what the model was trained for)",
    )


def _add_speculation(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--speculate",
        type=whole_number(0, 16),
        default=0,
        metavar="TOKENS",
        help="most tokens that a sequence guesses from its own text in one step; the output is the same, and "
        "comes sooner where text repeats; 0 is off (default: %(default)s)",
    )
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="a smaller model of the same vocabulary that guesses those tokens instead, named as MODEL is; "
        "--kv-memory covers its KV cache, too (default: none)",
    )


def _add_lower_tiers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host-cache",
        metavar="SIZE",
        help="memory beside the KV cache where blocks go that it has no room for, such as 4GiB; a prompt "
        "that needs them gets them back instead of computing them again (default: none)",
    )
    group.add_argument(
        "--disk-cache",
        metavar="PATH",
        help="a file or directory where such blocks go next; they are still there after a restart "
        "(default: none)",
    )
    group.add_argument(
        "--disk-cache-size",
        metavar="SIZE",
        help="most that --disk-cache may take on disk (default: 4GiB)",
    )


def _add_scheduling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--schedule",
        choices=("fcfs", "priority", "prefix", "fair"),
        default="fcfs",
        help="which waiting request starts next: the first that came, the most important, the one with most "
        "of its prompt in the cache, or that of the client served least; none waits for ever "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--preemption",
        choices=("auto", "recompute", "swap"),
        default="auto",
        help="what becomes of a running request that has to wait because memory is short: its cache entries "
        "are computed again, are moved to --host-cache and back, or whichever is measured to be cheaper "
        "(default: %(default)s)",
    )


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--threads",
        type=whole_number(1, 1024),
        metavar="N",
        help="threads to compute with (default: the CPUs that this process may use, by its CPU mask and by "
        "its container's quota)",
    )
    group.add_argument(
        "--no-prefix-caching",
        dest="prefix_caching",
        action="store_false",
        help="compute every prompt in full, even when an earlier one began with the same text",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Options of how each next token is chosen."""
    group = parser.add_argument_group("sampling options", "How each next token is chosen.")
    group.add_argument(
        "--temperature",
        type=number(0),
        default=1.0,
        metavar="X",
        help="0 always takes the likeliest token; higher is more varied (default: %(default)s)",
    )
    group.add_argument(
        "--top-p",
        type=number(0, 1, above=True),
        default=1.0,
        metavar="X",
        help="choose among the likeliest tokens that together have this probability (default: 1, all)",
    )
    group.add_argument(
        "--top-k",
        type=whole_number(0, INT32_MAX),
        default=0,
        metavar="K",
        help="choose among the K likeliest tokens (default: 0, all)",
    )
    group.add_argument(
        "--min-p",
        type=number(0, 1),
        default=0.0,
        metavar="X",
        help="leave out tokens less likely than X times the likeliest (default: 0, none)",
    )
    group.add_argument(
        "--seed",
        type=whole_number(0, INT64_MAX),
        metavar="N",
        help="the same seed gives the same answer again (default: another one each time)",
    )
    group.add_argument(
        "--max-tokens",
        type=whole_number(1, INT32_MAX),
        metavar="N",
        help="most tokens of an answer (default: the room left in --max-model-len)",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end an answer before this text; may be given several times",
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine's settings from parsed options."""
    from octavo.engine.config import EngineConfig

    return EngineConfig(
        model=args.model,
        dtype=args.dtype,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        kv_memory=args.kv_memory,
        max_num_seqs=args.max_num_seqs,
        max_batched_tokens=args.max_batched_tokens,
        max_model_len=args.max_model_len,
        prefix_caching=args.prefix_caching,
        host_cache=args.host_cache,
        disk_cache=args.disk_cache,
        disk_cache_size=args.disk_cache_size,
        kv_dtype=args.kv_dtype,
        weights=args.weights,
        threads=args.threads,
        schedule=args.schedule,
        preemption=args.preemption,
        max_queue=getattr(args, "max_queue", None),
        tenant_weights=getattr(args, "tenant_weights", None) or None,
        speculate=args.speculate,
        draft_model=args.draft_model,
    )


def sampling_params(args: argparse.Namespace, n: int = 1) -> SamplingParams:
    """The sampling parameters from parsed options."""
    from octavo.engine.params import SamplingParams

    return SamplingParams(
        n=n,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.seed,
        stop=tuple(args.stop),
    )

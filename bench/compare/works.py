"""The workloads, what a run of one is measured by, and the checks that an engine did the whole of it. Pure.

W1 one request      W2 all at once      W3 all, then all again      W4 n samples
W5 W2 with a small KV cache             W6 the first alone, then the others at once
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KV_TOKENS = 65_536  # unless the workload limits it
LOWER, HIGHER = "lower", "higher"

# workload, figure, which is better (None: no ratio)
FIGURES = (
    ("W1", "prefill ms", LOWER),
    ("W1", "decode tok/s", HIGHER),
    ("W2", "wall s", LOWER),
    ("W2", "output tok/s", HIGHER),
    ("W3", "cold wall s", LOWER),
    ("W3", "warm wall s", LOWER),
    ("W4", "wall s", LOWER),
    ("W5", "wall s", LOWER),
    ("W6", "prefill tok/s", HIGHER),
    ("W6", "decode tok/s", HIGHER),
    ("W6", "wall s", LOWER),
    ("start", "ready s", LOWER),
    ("start", "resident MiB", LOWER),
    ("memory", "peak MiB", LOWER),
    ("install", "MiB", LOWER),
    ("install", "packages", None),
)


@dataclass(frozen=True, slots=True)
class Work:
    """One workload. batches: lists of requests; each list is sent at once, when the one before has ended."""

    name: str
    batches: tuple[tuple[dict[str, Any], ...], ...]
    kv_tokens: int
    max_len: int
    kv_limited: bool = False


def load(works: dict[str, Any], name: str, scale: float = 1.0) -> Work:
    """Workload `name` of the file's content, its lengths and its KV limit times `scale`."""
    work = {**works[works[name].get("same_as", name)], **works[name]}
    shared = work.get("shared_prefix_len", 0)
    requests = []
    for request in work["requests"]:
        prompt = request["prompt"]
        head, tail = prompt[:shared], prompt[shared:]
        cut = head[: _scaled(len(head), scale)] + tail[: _scaled(len(tail), scale)]
        requests.append(
            {
                "prompt": cut,
                "max_tokens": max(2, _scaled(request["max_tokens"], scale)),
                "n": work.get("n", 1),
                "temperature": work.get("temperature", 0),
            }
        )
    batches = {"W3": (requests, requests), "W6": (requests[:1], requests[1:])}.get(name, (requests,))
    longest = max(len(r["prompt"]) + r["max_tokens"] for r in requests)
    limit = work.get("kv_tokens")
    kv_tokens = KV_TOKENS if limit is None else max(_scaled(limit, scale), longest + 32) // 32 * 32
    return Work(name, tuple(tuple(b) for b in batches), kv_tokens, longest, limit is not None)


def _scaled(length: int, scale: float) -> int:
    return max(1, round(length * scale)) if length else 0


def faults(work: Work, results: list[dict[str, Any]]) -> list[str]:
    """One line for every request not done in full. results: {"wall", "answers"} per batch."""
    lines = []
    for batch, result in zip(work.batches, results, strict=True):
        for number, (request, answer) in enumerate(zip(batch, result["answers"], strict=True)):
            counts = [len(tokens) for tokens in answer["tokens"]]
            if answer["error"]:
                lines.append(f"request {number}: {answer['error']}")
            elif answer["prompt"] != len(request["prompt"]):
                lines.append(
                    f"request {number}: {answer['prompt']} prompt tokens, not {len(request['prompt'])}"
                )
            elif counts != [request["max_tokens"]] * request["n"]:
                lines.append(
                    f"request {number}: {counts} tokens, not {request['n']} x {request['max_tokens']}"
                )
    return lines


def figures(work: Work, results: list[dict[str, Any]]) -> dict[str, float]:
    """What FIGURES lists for this workload, from results without faults in what each figure needs."""
    wall = sum(result["wall"] for result in results)
    if work.name == "W3":
        return {"cold wall s": results[0]["wall"], "warm wall s": results[1]["wall"]}
    if work.name in ("W1", "W6"):
        request, answer = work.batches[0][0], results[0]["answers"][0]
        decode = (request["max_tokens"] - 1) / (answer["end"] - answer["first"])
        if work.name == "W1":
            return {"prefill ms": answer["first"] * 1000, "decode tok/s": decode}
        prefill = len(request["prompt"]) / answer["first"]
        return {"prefill tok/s": prefill, "decode tok/s": decode, "wall s": wall}
    produced = sum(len(t) for result in results for answer in result["answers"] for t in answer["tokens"])
    return {"wall s": wall, "output tok/s": produced / wall} if work.name == "W2" else {"wall s": wall}


def agreement(ours: list[int], theirs: list[int]) -> int:
    """How many tokens two greedy answers begin with in common."""
    for number, (a, b) in enumerate(zip(ours, theirs)):
        if a != b:
            return number
    return min(len(ours), len(theirs))

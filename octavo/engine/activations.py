"""How much memory a step takes besides weights and KV: estimated from the model's shape, and measured on this
machine by a few tokens where the KV cache takes what is left.

    trim the heap -> reset the high-water mark of the process -> a few tokens forward, logits of some rows
    peak = (mark - resident before) scaled to a whole step

Linux only: where /proc does not tell, the answer is None and the estimate from the model's shape counts.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.attention import AttentionBackend, AttentionBatch
from octavo.engine.config import AUTO, EngineConfig
from octavo.models import Decoder, ModelConfig, activation_bytes

PROBE_TOKENS = 128
PROBE_PRODUCTS = 2e10
"""Multiplications that the probe may cost: fewer tokens for a large model."""
_BLOCK = 16
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Activations:
    """The bytes of a step, as estimated from the model's shape and as measured, if they were."""

    estimate: int
    measured: int | None

    @property
    def bytes(self) -> int:
        """What is reckoned with: the larger of the two."""
        return max(self.estimate, self.measured or 0)

    def row(self) -> str:
        """For the start-up table."""
        if self.measured is None:
            return f"{self.estimate:,} bytes a step at most, estimated"
        return (
            f"{self.bytes:,} bytes a step at most ({self.measured:,} measured, {self.estimate:,} estimated)"
        )


def estimated_activations(
    config: EngineConfig, model: ModelConfig, draft: ModelConfig | None, value_bytes: int
) -> int:
    """Bytes of the largest step that the options allow, with values of `value_bytes` each. A draft model's
    passes are over before the model's begins, so the larger of the two counts."""
    tokens, rows = config.max_batched_tokens, config.most_rows
    models = [model] if draft is None else [model, draft]
    return max(activation_bytes(one, value_bytes, tokens, rows) for one in models)


def step_activations(
    config: EngineConfig,
    decoder: Decoder,
    draft: ModelConfig | None,
    backend: AttentionBackend,
    kv_dtype: torch.dtype,
) -> Activations:
    """The memory of a step with these options; measured only where they leave the KV cache what is left."""
    estimate = estimated_activations(config, decoder.config, draft, decoder.dtype.itemsize)
    measured = None
    if config.kv_memory == AUTO:
        measured = measured_activations(
            decoder, backend, kv_dtype, config.max_batched_tokens, config.most_rows
        )
    return Activations(estimate, measured)


@torch.inference_mode()
def measured_activations(
    decoder: Decoder, backend: AttentionBackend, kv_dtype: torch.dtype, num_tokens: int, num_rows: int
) -> int | None:
    """Bytes at the peak of a step of `num_tokens` tokens with `num_rows` sampled; None if it cannot be told.

    Cost: two forward passes of at most PROBE_TOKENS tokens.
    """
    config = decoder.config
    probe = min(num_tokens, PROBE_TOKENS, max(8, int(PROBE_PRODUCTS / decoder.weights_bytes)))
    if config.position_limit is not None:
        probe = min(probe, config.position_limit)
    blocks = -(-probe // _BLOCK)
    caches = [
        backend.allocate(blocks, _BLOCK, config.num_kv_heads, config.head_dim, kv_dtype)
        for _ in range(config.num_layers)
    ]
    batch = AttentionBatch(
        tables=torch.arange(blocks, dtype=torch.int32).view(1, -1),
        query_start=torch.tensor([0, probe], dtype=torch.int32),
        kv_len=torch.tensor([probe], dtype=torch.int32),
        slots=torch.arange(probe),
    )

    def forward() -> torch.Tensor:
        return decoder.forward(
            torch.zeros(probe, dtype=torch.long), torch.arange(probe), caches, batch, backend
        )

    forward()  # what libraries set up once is not part of a step
    hidden, step = _peak(forward)
    rows = hidden[:1].expand(num_rows, -1).contiguous()
    _, sampled = _peak(lambda: decoder.logits(rows).clone())
    if step is None or sampled is None:
        return None
    return max(step * num_tokens // probe, sampled)


def _peak(work: object) -> tuple[torch.Tensor, int | None]:
    """The result of `work`, and the bytes by which resident memory rose at its height."""
    assert callable(work)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        _CLEAR.write_text("5")
        before = _status("VmRSS")
        result = work()
        return result, max(0, _status("VmHWM") - before)
    except OSError:
        return work(), None


def _status(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {key} in {_STATUS}")

"""What an engine would come to on a model, without loading it: the same sums that its start-up does.

ModelConfig + EngineConfig + memory --> weights, activations, Budget --> requests that fit, and what would
                                                                         have to change for a wanted number
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.attention import make_backend
from octavo.engine.config import AUTO, DTYPES, Budget, EngineConfig
from octavo.engine.defaults import choose_format
from octavo.engine.errors import ConfigError
from octavo.kv import KV_DTYPES, LIBRARIES, KVShape, requests_that_fit, reserve_in
from octavo.models import Header, activation_bytes, weights_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """memory: bytes that the process may take in all. weights, activations: of them. reserve: left free,
    where kv_memory is "auto", else 0. shape and budget: the KV cache's. config: the options it is for."""

    config: EngineConfig
    header: Header
    memory: int
    weights: int
    activations: int
    reserve: int
    kv_dtype: str
    shape: KVShape
    budget: Budget

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache."""
        return self.budget.num_blocks * self.budget.bytes_per_block

    @property
    def total(self) -> int:
        """Bytes of the process once every block is in use and a step is at its height."""
        return self.weights + self.activations + LIBRARIES + self.kv_bytes + self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier."""
        return self.budget.host_blocks * self.budget.bytes_per_block

    def fitting(self, num_tokens: int) -> int:
        """Requests of `num_tokens` tokens that have all their blocks at once."""
        return requests_that_fit(self.budget.num_blocks, self.budget.block_size, num_tokens)


def plan_memory(config: EngineConfig, header: Header, memory: int) -> MemoryPlan:
    """The plan of an engine with these options where `memory` bytes are free before it starts.

    Raises ConfigError, as the engine would, when the weights or the cache do not fit.
    """
    model, value_bytes = header.config, DTYPES[config.dtype].itemsize
    weights = weights_bytes(header, config.dtype, config.weights)
    rows = min(config.max_num_seqs, config.max_batched_tokens)
    activations = activation_bytes(model, value_bytes, config.max_batched_tokens, rows)
    left = memory - weights
    if left <= 0:
        raise ConfigError(
            f"the weights need {weights:,} bytes as {config.dtype}, but there are {memory:,}: "
            "give more memory, a smaller dtype or a smaller model",
            param="dtype",
        )
    format = choose_format(config, config.dtype, make_backend().name)
    shape = KVShape.stored_as(model.num_layers, model.num_kv_heads, model.head_dim, format.dtype)
    context = model.position_limit or model.max_position_embeddings
    budget = Budget.plan(
        config, shape, context, left, default_block_size=format.block_size, activations=activations
    )
    reserve = reserve_in(left) if config.kv_memory == AUTO else 0
    return MemoryPlan(config, header, memory, weights, activations, reserve, format.dtype, shape, budget)


def variants(plan: MemoryPlan, block_sizes: tuple[int, ...]) -> list[MemoryPlan]:
    """The same memory with other formats of the cache: each KV dtype with each block size that fits."""
    found = []
    for dtype in KV_DTYPES:
        for size in block_sizes:
            config = replace(plan.config, kv_dtype=dtype, block_size=size, max_model_len=None)
            try:
                found.append(plan_memory(config, plan.header, plan.memory))
            except ConfigError:
                continue  # not even a block fits
    return found


@dataclass(frozen=True, slots=True)
class Change:
    """One way to reach a target: the option, its value, and what it comes to."""

    option: str
    value: str
    note: str


def changes(plan: MemoryPlan, context: int, concurrency: int) -> list[Change]:
    """What would make room for `concurrency` requests of `context` tokens, one change at a time; none if
    there is room already."""
    if plan.fitting(context) >= concurrency:
        return []
    size, per_block = plan.budget.block_size, plan.budget.bytes_per_block
    need = concurrency * -(-context // size)
    kv = need * per_block
    ways = [Change("--kv-memory", f"{kv:,}", f"{kv / 2**30:.1f} GiB for {need:,} blocks")]
    total = plan.weights + plan.activations + LIBRARIES + plan.host_bytes + kv
    if plan.config.kv_memory == AUTO:
        # The reserve is an eighth of what the weights leave, so the rest is seven eighths of it.
        memory = plan.weights + max(-(-(total - plan.weights) * 8 // 7), total - plan.weights + 256 * 2**20)
        ways = [
            Change(
                "--memory",
                f"{memory:,}",
                f"{memory / 2**30:.1f} GiB in all, of which {kv / 2**30:.1f} for KV",
            )
        ]
    for dtype, (value, scale) in KV_DTYPES.items():
        shape = replace(plan.shape, bytes_per_value=value, bytes_per_scale=scale)
        fits = requests_that_fit(plan.kv_bytes // shape.bytes_per_block(size), size, context)
        if fits >= concurrency:
            ways.append(Change("--kv-dtype", dtype, f"{fits:,} requests of {context:,} tokens"))
    blocks_each = plan.budget.num_blocks // concurrency
    if blocks_each:
        longest = blocks_each * size
        ways.append(
            Change("--context", f"{longest:,}", f"{concurrency:,} requests of up to {longest:,} tokens")
        )
    fits = plan.fitting(context)
    if fits:
        ways.append(Change("--concurrency", f"{fits:,}", f"{fits:,} at once, the others wait their turn"))
    return ways

"""What an engine would come to on a model, without loading it: the same sums that its start-up does.

ModelConfig + EngineConfig + memory --> weights, activations, Budget --> requests that fit, and what would
                                                                         have to change for a wanted number
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.attention import make_backend
from octavo.engine.activations import estimated_activations
from octavo.engine.config import AUTO, DTYPES, Budget, EngineConfig
from octavo.engine.defaults import choose_format, shape_of
from octavo.engine.errors import ConfigError
from octavo.kv import KV_DTYPES, LIBRARIES, KVShape, requests_that_fit, reserve_in
from octavo.models import WEIGHTS, Header, ModelError, quantised, weights_bytes

TOKENIZER_BYTES = 320
"""Of memory for each entry of a vocabulary, as measured on one of 49,152 entries (15.5 MB)."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """memory: bytes that the process may take in all. program: of them, what it has before the weights, and
    the tokenizer. weights, activations: of them too. reserve: left free, where kv_memory is "auto", else 0.
    shape and budget: the KV cache's. config: the options it is for. draft and draft_weights: of the draft
    model, None and 0 without; its KV is part of kv_bytes."""

    config: EngineConfig
    header: Header
    memory: int
    program: int
    weights: int
    activations: int
    reserve: int
    kv_dtype: str
    shape: KVShape
    budget: Budget
    draft: Header | None = None
    draft_weights: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, the draft model's included."""
        return self.budget.bytes_per_block + self.budget.draft_bytes_per_block

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache, and of the draft model's."""
        return self.budget.num_blocks * self.block_bytes

    @property
    def total(self) -> int:
        """Bytes of the process once every block is in use and a step is at its height."""
        weights = self.weights + self.draft_weights
        return self.program + weights + self.activations + LIBRARIES + self.kv_bytes + self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier."""
        return self.budget.host_blocks * self.budget.bytes_per_block

    def fitting(self, num_tokens: int) -> int:
        """Requests of `num_tokens` tokens that have all their blocks at once."""
        return requests_that_fit(self.budget.num_blocks, self.budget.block_size, num_tokens)


def program_bytes(header: Header, resident: int) -> int:
    """Bytes of a process that has `resident` before a model is loaded, with the model's tokenizer."""
    return resident + TOKENIZER_BYTES * header.config.vocab_size


def plan_memory(
    config: EngineConfig, header: Header, memory: int, program: int = 0, draft: Header | None = None
) -> MemoryPlan:
    """The plan of an engine with these options in a process that may take `memory` bytes, of which `program`
    are gone before the weights; without, `memory` is what is free then. draft: the header of
    config.draft_model.

    Raises ConfigError, as the engine would, when the weights or the cache do not fit.
    """
    model, value_bytes = header.config, DTYPES[config.dtype].itemsize
    weights = weights_bytes(header, config.dtype, config.weights)
    guesser = draft.config if draft is not None else None
    activations = estimated_activations(config, model, guesser, value_bytes)
    draft_weights = weights_bytes(draft, config.dtype, config.weights) if draft is not None else 0
    left = memory - program - weights - draft_weights
    if left <= 0:
        raise ConfigError(
            f"the weights need {weights + draft_weights:,} bytes as {config.dtype}, but there are "
            f"{max(0, memory - program):,} for them ({memory:,} less {program:,} of the program): give more "
            "memory, a smaller dtype or a smaller model",
            param="dtype",
        )
    format = choose_format(
        config, config.dtype, quantised(header, config.dtype, config.weights), make_backend()
    )
    shape = shape_of(model, format.dtype)
    context = model.position_limit or model.max_position_embeddings
    budget = Budget.plan(
        config, shape, context, left, default_block_size=format.block_size, activations=activations,
        draft=shape_of(draft.config, format.dtype) if draft is not None else None,
    )  # fmt: skip
    reserve = reserve_in(left) if config.kv_memory == AUTO else 0
    return MemoryPlan(
        config,
        header,
        memory,
        program,
        weights,
        activations,
        reserve,
        format.dtype,
        shape,
        budget,
        draft,
        draft_weights,
    )


def variants(plan: MemoryPlan, block_sizes: tuple[int, ...]) -> list[MemoryPlan]:
    """The same memory with other formats of the cache: each KV dtype with each block size that fits."""
    found = []
    for dtype in KV_DTYPES:
        for size in block_sizes:
            config = replace(plan.config, kv_dtype=dtype, block_size=size, max_model_len=None)
            try:
                found.append(plan_memory(config, plan.header, plan.memory, plan.program, plan.draft))
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
    size, per_block = plan.budget.block_size, plan.block_bytes
    need = concurrency * -(-context // size)
    kv = need * per_block
    note = f"{kv / 2**30:.1f} GiB for {need:,} blocks"
    if plan.config.kv_memory == AUTO:
        # The reserve is an eighth of what program and weights leave, so the rest is seven eighths of it.
        fixed = plan.program + plan.weights + plan.draft_weights
        rest = plan.activations + LIBRARIES + plan.host_bytes + kv
        memory = fixed + max(-(-rest * 8 // 7), rest + 256 * 2**20)
        note = f"{memory / 2**30:.1f} GiB in all, of which {kv / 2**30:.1f} for KV"
        ways = [Change("--memory", f"{memory:,}", note)]
    elif plan.config.num_blocks is not None:
        ways = [Change("--num-blocks", f"{need:,}", f"{kv / 2**30:.1f} GiB")]
    else:
        ways = [Change("--kv-memory", f"{kv:,}", note)]
    formats = [("--kv-dtype", name, replace(plan.config, kv_dtype=name)) for name in KV_DTYPES]
    if plan.config.kv_memory == AUTO:
        formats += [
            ("--weights", name, replace(plan.config, weights=name))
            for name in WEIGHTS
            if plan.config.dtype == "float32"
        ]
    ways += _smaller(plan, formats, context, concurrency)
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


def _smaller(
    plan: MemoryPlan, formats: list[tuple[str, str, EngineConfig]], context: int, concurrency: int
) -> list[Change]:
    """Of options with a value each, those with which `concurrency` requests fit."""
    ways = []
    for option, value, config in formats:
        try:
            fits = plan_memory(config, plan.header, plan.memory, plan.program, plan.draft).fitting(context)
        except (ConfigError, ModelError):  # not with the other options, or not on this machine
            continue
        if fits >= concurrency:
            ways.append(Change(option, value, f"{fits:,} requests of {context:,} tokens"))
    return ways

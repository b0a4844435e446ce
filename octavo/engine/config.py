"""The engine's options, and what they come to on a given model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from octavo.engine.errors import ConfigError
from octavo.kv import KV_DTYPES, LIBRARIES, KVShape, automatic, blocks_in, parse_bytes, reserve_in
from octavo.kv.errors import InvalidArgument
from octavo.models import WEIGHTS
from octavo.sched.config import ORDERS, PREEMPTION_MODES, OrderName, PreemptionMode

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STORED = {**DTYPES, "int8": torch.int8}  # of KV_DTYPES
AUTO = "auto"
DEFAULT_BLOCK_SIZE = 16
DEFAULT_KV_MEMORY = "2GiB"
MAX_SPECULATE = 16
DEFAULT_DISK_CACHE = "4GiB"
JUDGED_ROWS = 64
"""Prompt positions whose logits are in memory at once, where prompt_logprobs are wanted."""


@dataclass(frozen=True)
class EngineConfig:
    """Options of LLM and of the command line.

    model: smollm2, a directory, a .gguf file or a hub name. dtype: of hidden states. block_size: token
    slots per KV block, 1..256; None chooses (defaults.py). kv_memory: bytes for the KV cache ("2GiB", or
    "auto": what the machine can spare), or num_blocks: that many blocks; not both; by default 2GiB.
    max_num_seqs: sequences that run at once. max_batched_tokens: tokens that one step computes.
    max_model_len: tokens of prompt and output together; by default the model's own context, or what the
    cache holds if that is less. prefix_caching: reuse computed blocks. host_cache: bytes of host memory
    where evicted blocks go. disk_cache: a file or directory where they go next, kept across restarts, of at
    most disk_cache_size bytes (default 4GiB). checked: validate every block id and length each step.
    kv_dtype: of stored keys and values, "auto" for that of float weights and sixteen bits beside quantised
    ones (defaults.py); int8 has a scale per token and head. weights: auto (as the checkpoint stores them),
    float32, int8 or int4; see load_model. schedule: who is admitted first: fcfs, priority, prefix (longest
    cached prefix) or fair (per tenant, by tenant_weights, 1 where not named). preemption: what becomes of
    the KV of a sequence that must wait: recompute, swap (to host_cache) or auto. max_queue: sequences that
    may wait beyond max_num_seqs; None is no limit. threads: that a step computes with; None takes what the
    process may use (cpus.py). speculate: tokens that a sequence may guess from its own text each step,
    checked in the same pass; 0..16, 0 is off. draft_model: guesses them instead, a model of the same
    vocabulary; its KV cache has as many blocks, and kv_memory covers both.
    """

    model: str = "smollm2"
    dtype: str = "float32"
    block_size: int | None = None
    num_blocks: int | None = None
    kv_memory: str | int | None = None
    max_num_seqs: int = 64
    max_batched_tokens: int = 2048
    max_model_len: int | None = None
    prefix_caching: bool = True
    host_cache: str | int | None = None
    disk_cache: str | None = None
    disk_cache_size: str | int | None = None
    checked: bool = False
    kv_dtype: str = AUTO
    weights: str = AUTO
    threads: int | None = None
    schedule: OrderName = "fcfs"
    tenant_weights: Mapping[str, float] | None = None
    preemption: PreemptionMode = "auto"
    max_queue: int | None = None
    speculate: int = 0
    draft_model: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}", param="dtype")
        if self.kv_dtype not in (AUTO, *KV_DTYPES):
            raise ConfigError(
                f"kv_dtype must be one of {', '.join((AUTO, *KV_DTYPES))}, got {self.kv_dtype!r}",
                param="kv_dtype",
            )
        if self.weights not in WEIGHTS:
            raise ConfigError(
                f"weights must be one of {', '.join(WEIGHTS)}, got {self.weights!r}", param="weights"
            )
        if self.weights != AUTO and self.dtype != "float32":
            raise ConfigError(
                f"weights {self.weights!r} are computed in float32, but dtype is {self.dtype}: give up one",
                param="weights",
            )
        if self.block_size is not None:
            self._integer("block_size", 1, 256)
        if self.threads is not None:
            self._integer("threads", 1, 1024)
        self._check_schedule()
        self._integer("speculate", 0, MAX_SPECULATE)
        if self.draft_model is not None and self.speculate == 0:
            raise ConfigError(
                f"draft_model {self.draft_model!r:.80} is to guess, but speculate is 0: say how many tokens "
                f"a step, 1 to {MAX_SPECULATE}",
                param="draft_model",
            )
        self._integer("max_num_seqs", 1, 2**16)
        self._integer("max_batched_tokens", 1, 2**24)
        if self.num_blocks is not None:
            self._integer("num_blocks", 1, 2**31 - 1)
            if self.kv_memory is not None:
                raise ConfigError("give num_blocks or kv_memory, not both", param="num_blocks")
        if self.max_model_len is not None:
            self._integer("max_model_len", 1, 2**31 - 1)
        if self.disk_cache_size is not None and self.disk_cache is None:
            raise ConfigError("disk_cache_size without disk_cache: say where it is", param="disk_cache_size")
        for name in ("host_cache", "disk_cache"):
            if getattr(self, name) is not None and not self.prefix_caching:
                message = f"{name} keeps blocks for reuse, but prefix_caching is off: give up one of them"
                raise ConfigError(message, param=name)

    @property
    def most_rows(self) -> int:
        """Rows of logits that a step has at once: of its sequences and their guesses, or of a prompt that is
        judged. For the memory of a step."""
        return min(self.max_batched_tokens, max(self.max_num_seqs * (1 + self.speculate), JUDGED_ROWS))

    def _check_schedule(self) -> None:
        for name, names in (("schedule", ORDERS), ("preemption", PREEMPTION_MODES)):
            if getattr(self, name) not in names:
                raise ConfigError(
                    f"{name} must be one of {', '.join(names)}, got {getattr(self, name)!r:.80}", param=name
                )
        if self.max_queue is not None:
            self._integer("max_queue", 1, 2**31 - 1)
        if self.preemption == "swap" and self.host_cache is None:
            raise ConfigError(
                "preemption 'swap' moves sequences to host_cache, which is not set: give it a size, or "
                "choose auto or recompute",
                param="preemption",
            )
        if self.schedule == "prefix" and not self.prefix_caching:
            raise ConfigError(
                "schedule 'prefix' goes by cached prefixes, but prefix_caching is off: give up one of them",
                param="schedule",
            )
        if self.tenant_weights and self.schedule != "fair":
            raise ConfigError(
                f"tenant_weights are for schedule 'fair', not {self.schedule!r}", param="tenant_weights"
            )

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{name} must be an integer from {low} to {high}, got {value!r}", param=name)


@dataclass(frozen=True, slots=True)
class Budget:
    """What the options come to: blocks, their size, and the context that requests may use.

    block_size in tokens; bytes_per_block in all layers, scales included. context_note says why the
    context is less than the model's, else it is empty. draft_bytes_per_block: in the draft model's cache.
    """

    block_size: int
    num_blocks: int
    bytes_per_block: int
    max_model_len: int
    context_note: str
    host_blocks: int
    disk_blocks: int
    draft_bytes_per_block: int = 0

    @staticmethod
    def plan(
        config: EngineConfig,
        shape: KVShape,
        model_context: int,
        available: int | None = None,
        *,
        default_block_size: int = DEFAULT_BLOCK_SIZE,
        activations: int = 0,
        draft: KVShape | None = None,
    ) -> Budget:
        """Blocks from the memory budget, and the context that they can hold.

        available: bytes that can still be allocated, if known. default_block_size: where the options
        leave it open. activations: bytes of a step, which must fit beside the cache. draft: the draft model's
        shape. Raises ConfigError when they do not fit, or when an explicit max_model_len exceeds the model's
        context or the cache.
        """
        block_size = config.block_size if config.block_size is not None else default_block_size
        host_bytes = _size("host_cache", config.host_cache) if config.host_cache is not None else 0
        beside = draft.bytes_per_block(block_size) if draft is not None else 0
        try:
            if config.num_blocks is not None:
                blocks = config.num_blocks
            elif config.kv_memory == AUTO:
                blocks = _automatic_blocks(shape, block_size, available, activations, host_bytes, beside)
            else:
                memory = parse_bytes(config.kv_memory if config.kv_memory is not None else DEFAULT_KV_MEMORY)
                blocks = blocks_in(memory, shape, block_size, beside=beside)
        except InvalidArgument as error:
            raise ConfigError(str(error), param="kv_memory") from None
        per_block = shape.bytes_per_block(block_size)
        host = _tier_blocks("host_cache", config.host_cache, shape, block_size)
        disk_size = config.disk_cache_size if config.disk_cache_size is not None else DEFAULT_DISK_CACHE
        disk = _tier_blocks(
            "disk_cache_size", disk_size if config.disk_cache is not None else None, shape, block_size
        )
        if available is not None:
            _check_fits(config, blocks, host, per_block, available, activations, beside)
        slots = blocks * block_size
        wanted = config.max_model_len
        if wanted is not None and wanted > model_context:
            raise ConfigError(
                f"max_model_len {wanted} is more than the model's context of {model_context}",
                param="max_model_len",
            )
        if wanted is not None and wanted > slots:
            raise ConfigError(
                f"max_model_len {wanted} needs {-(-wanted // block_size)} blocks, but the KV cache "
                f"has {blocks} ({slots} tokens): raise kv_memory or num_blocks, or lower max_model_len",
                param="max_model_len",
            )
        context = wanted if wanted is not None else min(model_context, slots)
        note = ""
        if wanted is None and slots < model_context:
            note = f"lowered from the model's {model_context} to what the KV cache holds; {_more(config)}"
        return Budget(block_size, blocks, per_block, context, note, host, disk, beside)


def _more(config: EngineConfig) -> str:
    """How to have more blocks."""
    if config.kv_memory == AUTO:
        return "free some memory, or take a smaller kv_dtype"
    return "raise num_blocks" if config.num_blocks is not None else "raise kv_memory"


def _check_fits(
    config: EngineConfig,
    blocks: int,
    host: int,
    per_block: int,
    available: int,
    activations: int,
    draft: int,
) -> None:
    """Raise ConfigError unless the cache, a step and the libraries fit in `available` bytes: a server that
    starts all the same is killed once its blocks are in use. draft: bytes of a block in its cache."""
    beside = activations + LIBRARIES
    cache = (blocks + host) * per_block + blocks * draft
    if cache + beside <= available:
        return
    option = "num_blocks" if config.num_blocks is not None else "kv_memory"
    raise ConfigError(
        f"the KV cache would take {cache:,} bytes ({blocks:,} blocks and {host:,} of "
        f"host_cache), and a step and libraries {beside:,} more, but only {available:,} are available on "
        f"this machine: lower {option}",
        param=option,
    )


def _automatic_blocks(
    shape: KVShape,
    block_size: int,
    available: int | None,
    activations: int,
    host_bytes: int,
    beside: int,
) -> int:
    """The blocks of kv_memory "auto": what the machine can spare."""
    if available is None:
        raise InvalidArgument("kv_memory auto: this system does not say how much memory is free; give a size")
    memory = automatic(available, activations, host_bytes)
    if memory < shape.bytes_per_block(block_size) + beside:
        raise InvalidArgument(
            f"kv_memory auto: of {available:,} bytes that are free, {activations:,} go to a step, "
            f"{LIBRARIES:,} to libraries, {host_bytes:,} to host_cache and {reserve_in(available):,} stay "
            f"free, which leaves {max(0, memory):,}, and one block needs "
            f"{shape.bytes_per_block(block_size) + beside:,}: free some memory, or give kv_memory as a size"
        )
    return blocks_in(memory, shape, block_size, beside=beside)


def _size(option: str, size: str | int) -> int:
    try:
        return parse_bytes(size, option)
    except InvalidArgument as error:
        raise ConfigError(str(error), param=option) from None


def _tier_blocks(option: str, size: str | int | None, shape: KVShape, block_size: int) -> int:
    """Blocks that a lower tier of `size` bytes holds; none where there is no such tier."""
    if size is None:
        return 0
    try:
        return blocks_in(parse_bytes(size, option), shape, block_size, option)
    except InvalidArgument as error:
        raise ConfigError(str(error), param=option) from None

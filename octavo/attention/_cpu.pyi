"""The compiled kernels (csrc/module.cpp). Addresses, strides and sizes in elements; cpu.py checks them."""

from collections.abc import Sequence

split: int
max_head_dim: int

def available_isas() -> list[str]: ...

class Cache:
    def __init__(
        self,
        addresses: Sequence[int],
        dtype: int,
        shape: Sequence[int],
        strides: Sequence[int],
        scale_strides: Sequence[int],
    ) -> None: ...

class Plan:
    def __init__(
        self,
        tables: int,
        table_stride: int,
        query_start: int,
        kv_len: int,
        sequences: int,
        columns: int,
        tokens: int,
        block_size: int,
        num_blocks: int,
        query_heads: int,
        kv_heads: int,
        dim: int,
        window: int,
        threads: int,
        share: bool,
        checked: bool,
    ) -> None: ...
    @property
    def error(self) -> tuple[int, int, int, int, int]: ...
    @property
    def tasks(self) -> int: ...
    @property
    def shared_tasks(self) -> int: ...

class Engine:
    def __init__(self, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    def attend(
        self,
        plan: Plan,
        cache: Cache,
        query: int,
        token_stride: int,
        head_stride: int,
        query_dtype: int,
        out: int,
        scale: float,
        softcap: float,
        sinks: int,
        alibi: int,
        lse: int,
    ) -> None: ...
    def write(
        self,
        cache: Cache,
        dtype: int,
        key: int,
        key_strides: Sequence[int],
        value: int,
        value_strides: Sequence[int],
        slots: int,
        tokens: int,
        threads: int,
        query: int,
        query_strides: Sequence[int],
        query_heads: int,
        cos: int,
        sin: int,
    ) -> int: ...
    def copy_blocks(self, cache: Cache, copies: Sequence[tuple[int, int, int]]) -> None: ...
    def move_blocks(
        self, cache: Cache, ids: int, count: int, dense: Cache, into_cache: bool, threads: int
    ) -> None: ...

"""The compiled kernels (csrc/module.cpp). Addresses, strides and sizes in elements; cpu.py checks them."""

from collections.abc import Sequence

split: int
max_head_dim: int
lanes: int

def available_isas() -> list[str]: ...
def ops_isas() -> list[str]: ...

class Cache:
    def __init__(
        self,
        addresses: Sequence[int],
        dtype: int,
        shape: Sequence[int],
        keys: Sequence[int],
        values: Sequence[int],
        scales: Sequence[int],
    ) -> None: ...
    @property
    def shape(self) -> tuple[int, int, int, int]: ...

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

scratch: int

def linear_isas() -> list[str]: ...

class Linear:
    def __init__(self, weights: int, outputs: int, inputs: int, paired: bool) -> None: ...
    @property
    def bytes(self) -> int: ...
    def fill(self, first: int, count: int, rows: int) -> None: ...
    def set_bias(self, values: int) -> None: ...
    def read_rows(self, ids: int, count: int, out: int) -> None: ...

class Chain:
    def __init__(self) -> None: ...
    def add(self, linear: Linear, norm: int, eps: float, epilogue: int, source: int, target: int) -> None: ...

class LinearEngine:
    def __init__(self, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    def run(
        self,
        chain: Chain,
        slot0: int,
        stride0: int,
        slot1: int,
        stride1: int,
        slot2: int,
        stride2: int,
        rows: int,
        threads: int,
    ) -> None: ...

class Ops:  # csrc/ops_module.cpp; octavo/ops checks what it is given
    def __init__(self, isa: str) -> None: ...
    @property
    def isa(self) -> str: ...
    def norm(
        self,
        dtype: int,
        shape: tuple[int, int, int],
        x: int,
        x_strides: tuple[int, int],
        out: int,
        out_strides: tuple[int, int],
        delta: int,
        weight: int,
        eps: float,
        threads: int,
    ) -> None: ...
    def swiglu(
        self,
        dtype: int,
        rows: int,
        dim: int,
        gate: int,
        gate_stride: int,
        up: int,
        up_stride: int,
        out: int,
        out_stride: int,
        threads: int,
    ) -> None: ...
    def sample(
        self,
        logits: int,
        row_stride: int,
        vocab: int,
        draws: Sequence[tuple[int, float, int, float, float, int, int, int]],
        threads: int,
    ) -> list[int]: ...
    def candidates(
        self,
        logits: int,
        vocab: int,
        draw: tuple[int, float, int, float, float, int, int, int],
        ids: int,
        weights: int,
    ) -> int: ...

class Layers:  # csrc/layers.h; octavo/models/layers.py checks what it is given
    def __init__(
        self,
        linear: LinearEngine,
        ops: Ops,
        chains: list[Chain],
        norms: list[tuple[int, int]],
        sizes: tuple[int, int, int, int],
        scale: float,
        eps: float,
    ) -> None: ...
    def run(
        self,
        attention: Engine,
        caches: list[Cache],
        plans: list[Plan],
        tensors: tuple[int, int, int],
        inputs: tuple[int, int, int, int],
        tokens: int,
        threads: int,
    ) -> int: ...

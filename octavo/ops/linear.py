"""Products in C++ (csrc/linear.h): matrices packed once, and chains of products in one call.

    StoredMatrix --pack--> PackedLinear            weights in tiles of 32 outputs
    Step(linear, norm, then, source, target)  x n  --> Chain.run(rows)

Owns what the kernels must be able to trust: shapes, dtypes and strides are checked here. Importing this
module raises ImportError where the extension is not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.attention import _cpu  # the extension holds all kernels, on one pool of threads
from octavo.ops.errors import IsaUnavailable, ShapeError
from octavo.ops.packing import KINDS, StoredMatrix

ISAS: tuple[str, ...] = tuple(_cpu.linear_isas())  # fastest first; "baseline" is always there
SCRATCH: int = _cpu.scratch
SLOTS = 3
_THEN = {"store": 0, "add": 1, "swiglu": 2}


def packed_bytes(kind: str, outputs: int, inputs: int, *, biased: bool, paired: bool) -> int:
    """What PackedLinear.num_bytes would be, without packing anything."""
    tile, group = 32, 32
    one = int(_cpu.Linear(KINDS.index(kind), tile, group, False).bytes)  # a tile of a group of inputs
    tiles = -(-outputs // tile)  # paired: half as many outputs in each half of the tiles
    if paired:
        tiles = -(-(outputs // 2) // (tile // 2))
    return tiles * one * inputs // group + 4 * biased * tiles * tile


class PackedLinear:
    """A matrix `[outputs, inputs]` packed for the kernels, with an optional bias `[outputs]`.

    paired: the first half of the outputs are gates and the rest ups, for Step(then="swiglu"). Packing reads
    the weights once; they are not kept.
    """

    def __init__(
        self, weights: StoredMatrix, bias: np.ndarray | None = None, *, paired: bool = False
    ) -> None:
        if paired and weights.outputs % 2:
            raise ShapeError(f"{weights.outputs} outputs cannot be gates and ups")
        self.kind, self.outputs, self.inputs, self.paired = (
            weights.kind,
            weights.outputs,
            weights.inputs,
            paired,
        )
        self._native = _cpu.Linear(KINDS.index(weights.kind), self.outputs, self.inputs, paired)
        rows = np.ascontiguousarray(weights.rows)
        self._native.fill(0, self.outputs, rows.ctypes.data)
        if bias is not None:
            values = np.ascontiguousarray(bias, np.float32)
            if values.shape != (self.outputs,):
                raise ShapeError(f"a bias of shape {values.shape} for {self.outputs} outputs")
            self._native.set_bias(values.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Memory of the packed weights and the bias."""
        return int(self._native.bytes)

    def rows(self, ids: Tensor) -> Tensor:
        """Read weight rows `ids` `[T]` int64 back: float32 `[T, inputs]`. For an embedding table.

        Raises ShapeError for an id outside 0..outputs-1.
        """
        if ids.dtype != torch.int64 or ids.ndim != 1:
            raise ShapeError(f"ids are {ids.dtype} of shape {tuple(ids.shape)}; they must be int64 [T]")
        ids = ids.contiguous()
        array = ids.numpy()
        if array.size and (int(array.min()) < 0 or int(array.max()) >= self.outputs):
            raise ShapeError(f"ids {array.min()}..{array.max()} for a table of {self.outputs} rows")
        out = torch.empty(len(ids), self.inputs)
        self._native.read_rows(ids.data_ptr(), len(ids), out.data_ptr())
        return out


@dataclass(frozen=True, slots=True)
class Step:
    """One product of a chain: target = then(linear(norm(source))).

    source and target: numbers of the tensors that Chain.run is given, or SCRATCH, memory of the chain.
    norm: weights `[inputs]` of a root mean square norm with `eps`, or None. then: "store", "add" to the
    target, or "swiglu", which stores silu(gate) * up of a paired linear.
    """

    linear: PackedLinear
    source: int
    target: int
    norm: Tensor | None = None
    eps: float = 0.0
    then: str = "store"


class LinearEngine:
    """Runs chains with one instruction set's kernels: one of ISAS, the fastest when None.

    Calls from two threads wait for each other. Raises IsaUnavailable.
    """

    def __init__(self, isa: str | None = None) -> None:
        if isa is not None and isa not in ISAS:
            raise IsaUnavailable(f"{isa} products: this machine has {', '.join(ISAS)}")
        self.native = _cpu.LinearEngine(isa or ISAS[0])

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        return str(self.native.isa)


class Chain:
    """Products one after the other on the same rows, in one parallel region.

    A row's results depend on that row alone: their bits are the same in any company and with any number of
    threads. With quantised weights, activations are rounded to eight bits by groups of 32; a row that holds
    a NaN or an infinity becomes NaN in every result of such a product, and no other row changes.
    """

    def __init__(self, engine: LinearEngine, steps: Sequence[Step]) -> None:
        """Raises ShapeError when a step does not fit the one before it, or itself."""
        self._engine = engine.native
        self.native = _cpu.Chain()
        self._widths: list[int | None] = [None] * SLOTS  # columns of each tensor
        self._keep = [step.linear for step in steps]
        scratch: int | None = None
        for step in steps:
            linear = step.linear
            if step.then not in _THEN or (step.then == "swiglu") != linear.paired:
                raise ShapeError(
                    f"then={step.then!r} of a linear that is {'' if linear.paired else 'not '}paired"
                )
            columns = linear.outputs // 2 if linear.paired else linear.outputs
            if step.source == SCRATCH:
                if scratch != linear.inputs:
                    raise ShapeError(f"a linear of {linear.inputs} inputs after scratch of {scratch} columns")
            else:
                self._claim(step.source, linear.inputs)
            if step.target == SCRATCH:
                if step.then == "add":
                    raise ShapeError("scratch begins empty: nothing can be added to it")
                scratch = columns
            else:
                self._claim(step.target, columns)
            if step.source == step.target:
                raise ShapeError("a step cannot write what it reads")
            norm = None if step.norm is None else step.norm.to(torch.float32).contiguous()
            if norm is not None and norm.shape != (linear.inputs,):
                raise ShapeError(f"a norm of shape {tuple(norm.shape)} for {linear.inputs} inputs")
            self.native.add(
                linear._native,
                0 if norm is None else norm.data_ptr(),
                step.eps,
                _THEN[step.then],
                step.source,
                step.target,
            )

    def _claim(self, slot: int, columns: int) -> None:
        if not 0 <= slot < SLOTS:
            raise ShapeError(f"tensor number {slot}: there are {SLOTS}")
        if self._widths[slot] not in (None, columns):
            raise ShapeError(
                f"tensor {slot} has {self._widths[slot]} columns in one step and {columns} in another"
            )
        self._widths[slot] = columns

    def run(self, *tensors: Tensor) -> None:
        """Run on float32 tensors `[rows, columns]`, dense by rows, in the order of their numbers.

        Raises ShapeError, before anything is written, for another shape, dtype or layout.
        """
        rows = tensors[0].shape[0]
        places = [0, 0, 0, 0, 0, 0]
        for slot, width in enumerate(self._widths):
            if width is None:
                continue
            tensor = tensors[slot]
            if (
                tensor.shape != (rows, width)
                or tensor.dtype != torch.float32
                or (tensor.stride(1) != 1 and width > 1)
            ):
                raise ShapeError(
                    f"tensor {slot} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
                    f"{tensor.stride()}; it must be float32 of shape ({rows}, {width}), dense by rows"
                )
            places[slot * 2] = tensor.data_ptr()
            places[slot * 2 + 1] = tensor.stride(0)
        a, a_stride, b, b_stride, c, c_stride = places
        self._engine.run(self.native, a, a_stride, b, b_stride, c, c_stride, rows, torch.get_num_threads())


def linear(engine: LinearEngine, x: Tensor, weights: PackedLinear) -> Tensor:
    """Multiply rows `[M, inputs]` float32 with packed weights: `[M, outputs]`."""
    out = torch.empty(x.shape[0], weights.outputs)
    Chain(engine, [Step(weights, 0, 1)]).run(x, out)
    return out

"""RMSNorm, with the residual in the same pass, and SwiGLU.

    hidden [T, E]   += delta [T, E]   -> norm [T, E]        one read of each, one write of hidden and norm
    gate|up [T, 2 I]                  -> silu(gate) * up [T, I] in gate's place

float32, bfloat16 and float16; arithmetic in float32, rounded once at the end. A row's bits depend on that
row alone, and those of a norm not on the instruction set either. Tensors that the kernels do not take
(another device or dtype, or no compiled kernels) go through torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.compiled import CODES, kernels
from octavo.ops.errors import OpsError


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, isa: str | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis of x `[T, D]` or `[T, H, D]`; weight `[D]`.

    out: where to write, x itself included; a new dense tensor when None. Cost: one read of x, one write.
    Raises OpsError where shapes or dtypes do not fit.
    """
    _check(x, weight)
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        raise OpsError(f"out is {out.dtype} of shape {tuple(out.shape)}; x is {x.dtype} of {tuple(x.shape)}")
    ops = kernels(isa) if _takes(x) and (out is None or out.stride(-1) == 1) else None
    if ops is None:
        result = rms_norm_torch(x, weight, eps)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype)
    inner = x.shape[1] if x.dim() == 3 else 1
    ops.norm(
        CODES[x.dtype],
        (x.shape[0], inner, x.shape[-1]),
        x.data_ptr(),
        (x.stride(0), x.stride(-2)),
        out.data_ptr(),
        (out.stride(0), out.stride(-2)),
        0,
        weight.data_ptr(),
        eps,
        torch.get_num_threads(),
    )
    return out


def add_rms_norm(
    hidden: Tensor, delta: Tensor, weight: Tensor, eps: float, *, isa: str | None = None
) -> Tensor:
    """Add delta `[T, D]` to hidden `[T, D]` in place, and return rms_norm(hidden).

    The norm is of hidden as it was rounded to its dtype. Cost: one read of both, one write of hidden and
    of the result. Raises OpsError where shapes or dtypes do not fit.
    """
    _check(hidden, weight)
    if delta.shape != hidden.shape or delta.dtype != hidden.dtype or hidden.dim() != 2:
        raise OpsError(
            f"delta is {delta.dtype} of shape {tuple(delta.shape)} and hidden {hidden.dtype} of "
            f"{tuple(hidden.shape)}; both must be [tokens, {weight.shape[0]}] and of one dtype"
        )
    ops = kernels(isa) if _takes(hidden) else None
    if ops is None:
        hidden += delta
        return rms_norm_torch(hidden, weight, eps)
    delta = delta.contiguous()
    out = torch.empty(hidden.shape, dtype=hidden.dtype)
    strides = hidden.stride(0), 0
    ops.norm(
        CODES[hidden.dtype],
        (hidden.shape[0], 1, hidden.shape[1]),
        hidden.data_ptr(),
        strides,
        out.data_ptr(),
        (out.stride(0), 0),
        delta.data_ptr(),
        weight.data_ptr(),
        eps,
        torch.get_num_threads(),
    )
    return out


def swiglu(gate_up: Tensor, *, isa: str | None = None) -> Tensor:
    """silu(gate) * up of gate_up `[T, 2 I]`, whose rows are gate, then up: `[T, I]`, in gate's place.

    The result is a view of gate_up: fresh memory for it would cost more than the arithmetic. Cost: one
    read, one write. Raises OpsError for an odd width or another number of axes.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise OpsError(f"gate_up has shape {tuple(gate_up.shape)}; it must be [tokens, 2 * width]")
    ops = kernels(isa) if _takes(gate_up) else None
    if ops is None:
        return swiglu_torch(gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate, stride = gate_up.data_ptr(), gate_up.stride(0)
    up = gate + width * gate_up.element_size()
    threads = torch.get_num_threads()
    ops.swiglu(CODES[gate_up.dtype], rows, width, gate, stride, up, stride, gate, stride, threads)
    return gate_up[:, :width]


def _takes(x: Tensor) -> bool:
    return x.dtype in CODES and x.device.type == "cpu" and x.stride(-1) == 1


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() not in (2, 3) or weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise OpsError(
            f"x is {x.dtype} of shape {tuple(x.shape)} and weight {weight.dtype} of {tuple(weight.shape)}; "
            "they must be [tokens, dim] or [tokens, heads, dim] and [dim], of one dtype"
        )


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, or float64 for float64."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps).to(x.dtype)


def swiglu_torch(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `[T, 2 I]`, in float32, or float64 for float64; gate_up is left unchanged."""
    wide = gate_up if gate_up.dtype == torch.float64 else gate_up.float()
    gate, up = wide.chunk(2, dim=-1)
    return F.silu(gate).mul_(up).to(gate_up.dtype)

"""Kernels that follow a block table, behind one signature. See docs/attention.md."""

from __future__ import annotations

from octavo.attention.checks import check_batch
from octavo.attention.dense import dense_reference
from octavo.attention.errors import BackendUnavailable, BatchError, UnknownBackend
from octavo.attention.interface import AttentionBackend, AttentionBatch, LayerCache
from octavo.attention.reference import ReferenceBackend

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "BackendUnavailable",
    "BatchError",
    "LayerCache",
    "ReferenceBackend",
    "UnknownBackend",
    "backend_note",
    "check_batch",
    "dense_reference",
    "make_backend",
]

BACKENDS = ("auto", "cpu", ReferenceBackend.name)


def make_backend(name: str = "auto") -> AttentionBackend:
    """Make the backend called `name`; "auto" takes the fastest that this machine has.

    Raises UnknownBackend, which lists the names, and BackendUnavailable for "cpu" where the compiled
    kernels cannot be imported.
    """
    if name not in BACKENDS:
        raise UnknownBackend(name, BACKENDS)
    if name == ReferenceBackend.name:
        return ReferenceBackend()
    try:
        from octavo.attention.cpu import CpuBackend
    except ImportError as error:
        if name == "auto":
            return ReferenceBackend()
        raise BackendUnavailable(name, str(error)) from error
    return CpuBackend()


def backend_note() -> str:
    """Say what "auto" takes here and why, for a start-up table."""
    try:
        from octavo.attention.cpu import ISAS
    except ImportError as error:
        return f"reference (compiled kernels are not available: {error})"
    return f"cpu ({ISAS[0]})"

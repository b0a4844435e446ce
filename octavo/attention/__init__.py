"""Kernels that follow a block table, behind one signature. See docs/attention.md."""

from __future__ import annotations

from octavo.attention.checks import check_batch
from octavo.attention.dense import dense_reference
from octavo.attention.errors import BatchError, UnknownBackend
from octavo.attention.interface import AttentionBackend, AttentionBatch, LayerCache
from octavo.attention.reference import ReferenceBackend

__all__ = [
    "AttentionBackend",
    "AttentionBatch",
    "BatchError",
    "LayerCache",
    "ReferenceBackend",
    "UnknownBackend",
    "check_batch",
    "dense_reference",
    "make_backend",
]


def make_backend(name: str = "auto") -> AttentionBackend:
    """Make the backend called `name`; "auto" takes the fastest that this machine has.

    Raises UnknownBackend, which lists the names.
    """
    if name in ("auto", ReferenceBackend.name):
        return ReferenceBackend()
    raise UnknownBackend(name, ("auto", ReferenceBackend.name))

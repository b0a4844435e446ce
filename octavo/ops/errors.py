"""Errors of ops/."""

from __future__ import annotations

from octavo.errors import OctavoError


class OpsError(OctavoError):
    """Weights, activations or logits that an operation cannot take; the message says what it takes."""


class UnsupportedWeights(OpsError):
    """A kind, shape or dtype of weights that no kernel takes; the message names it."""


class ShapeError(OpsError):
    """Activations of another shape, dtype or layout than the weights want."""


class IsaUnavailable(OpsError):
    """An instruction set that this machine or this build lacks."""

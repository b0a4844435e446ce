"""Typed errors of octavo.engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import InvalidRequest, OctavoError

if TYPE_CHECKING:
    from octavo.engine.outputs import RequestOutput


class EngineError(OctavoError):
    """Any error of the engine that is not the caller's input."""


class ConfigError(EngineError, InvalidRequest):
    """An engine option that cannot be honoured; the message names it and both numbers."""


class StepFailed(EngineError):
    """The step that computed this request raised; `__cause__` is what it raised."""


class NoTokenAllowed(StepFailed):
    """A sequence had no token to go on with: bans and form ruled out all."""


class BadLogits(StepFailed):
    """The model gave NaN or infinity for a sequence; nothing of its KV is served to others."""


class EngineDead(EngineError):
    """The engine's thread has ended; nothing more will be computed."""


class GenerationFailed(EngineError):
    """Some prompts of a batch failed. `outputs` has an entry per prompt, None where it failed."""

    def __init__(self, message: str, outputs: list[RequestOutput | None]) -> None:
        super().__init__(message)
        self.outputs = outputs

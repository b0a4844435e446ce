"""Errors of models/: what could not be found, read, honoured or rendered.

OctavoError
 └─ ModelError
     ├─ ModelNotFound       the name leads to no checkpoint
     ├─ ConfigError         config.json or GGUF metadata lacks or garbles a value
     ├─ UnsupportedModel    understood, but this engine cannot honour it
     ├─ CheckpointError     weights: corrupt, truncated, missing, left over, wrong shape
     ├─ TokenizerError      tokenizer files or metadata
     └─ ChatTemplateError   (also InvalidRequest) the template refused or failed
         └─ NoChatTemplate  the model has none
"""

from __future__ import annotations

from octavo.errors import InvalidRequest, OctavoError


class ModelError(OctavoError):
    """A model cannot be resolved, loaded or used."""


class ModelNotFound(ModelError):
    """No checkpoint where the name points; the message says what was looked for."""


class ConfigError(ModelError):
    """The checkpoint's configuration lacks a value or holds one that makes no sense."""


class UnsupportedModel(ModelError):
    """The checkpoint asks for something that this engine cannot honour; the message names it."""


class CheckpointError(ModelError):
    """The weights are corrupt, truncated, incomplete, of another shape, or more than the model has."""


class TokenizerError(ModelError):
    """The tokenizer cannot be built from the checkpoint."""


class ChatTemplateError(ModelError, InvalidRequest):
    """The chat template refused the messages or failed on them; carries the template's own text."""


class NoChatTemplate(ChatTemplateError):
    """The model has no chat template: plain completions work, chat does not."""

"""Checkpoint -> logits: names, configuration, weights, tokenizer, decoder."""

from octavo.models.build import WEIGHTS
from octavo.models.config import ModelConfig, RopeConfig
from octavo.models.decoder import Decoder
from octavo.models.errors import (
    ChatTemplateError,
    CheckpointError,
    ConfigError,
    ModelError,
    ModelNotFound,
    NoChatTemplate,
    TokenizerError,
    UnsupportedModel,
)
from octavo.models.header import Header, activation_bytes, load_header, quantised, weights_bytes
from octavo.models.load import LoadedModel, load_model
from octavo.models.resolve import resolve_model
from octavo.models.tokenizer import Tokenizer

__all__ = [
    "WEIGHTS",
    "ChatTemplateError",
    "CheckpointError",
    "ConfigError",
    "Decoder",
    "Header",
    "LoadedModel",
    "ModelConfig",
    "ModelError",
    "ModelNotFound",
    "NoChatTemplate",
    "RopeConfig",
    "Tokenizer",
    "TokenizerError",
    "UnsupportedModel",
    "activation_bytes",
    "load_header",
    "load_model",
    "quantised",
    "resolve_model",
    "weights_bytes",
]

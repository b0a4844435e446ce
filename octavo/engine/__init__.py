"""The step loop: plan, forward, sample, commit; offline (`LLM`) and on a thread (`EngineThread`)."""

from octavo.engine.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.engine.errors import (
    BadLogits,
    ConfigError,
    EngineDead,
    EngineError,
    GenerationFailed,
    NoTokenAllowed,
    StepFailed,
)
from octavo.engine.llm import LLM
from octavo.engine.logprobs import TokenLogprob, TokenLogprobs
from octavo.engine.origin import Origin
from octavo.engine.outputs import CompletionOutput, RequestDelta, RequestOutput, SequenceDelta
from octavo.engine.params import SamplingParams
from octavo.engine.structured import StructuredOutputs
from octavo.engine.thread import EngineThread

__all__ = [
    "LLM",
    "BadLogits",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "EngineThread",
    "GenerationFailed",
    "NoTokenAllowed",
    "Origin",
    "RequestDelta",
    "RequestOutput",
    "SamplingParams",
    "SequenceDelta",
    "StepFailed",
    "StructuredOutputs",
    "TokenLogprob",
    "TokenLogprobs",
]

"""Octavo: a serving engine for language models built around PagedAttention.

    from octavo import LLM, SamplingParams
    LLM("smollm2").generate(["The sea is"], SamplingParams(max_tokens=32))

`octavo.kv`, the KV-cache manager, can be imported alone and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine.llm import LLM
    from octavo.engine.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Late, so that `import octavo.kv` and `octavo --help` do not wait for torch.
    if name == "LLM":
        from octavo.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from octavo.engine.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")

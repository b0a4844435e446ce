"""A real engine on a tiny random model whose chat template knows tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.engine import Engine, EngineConfig, EngineThread
from octavo.models import load_model
from tests.engine.helpers import tiny_checkpoint

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "answer with <tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_with_tools(directory: Path, **options: Any) -> Path:
    """The folder of the checkpoint."""
    path = tiny_checkpoint(directory, **options)[0]
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return path


def engine_thread(checkpoint: Path, **options: object) -> EngineThread:
    """A started thread; the caller shuts it down."""
    settings = {"block_size": 4, "num_blocks": 400, "checked": True, **options}
    thread = EngineThread(Engine(load_model(checkpoint), EngineConfig(model=str(checkpoint), **settings)))
    thread.start()
    return thread

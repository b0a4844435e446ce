"""Other client libraries, each by a script, against `octavo serve`; README.md says how to run them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.clients.served import served

pytestmark = [pytest.mark.clients, pytest.mark.model]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served("smollm2", "--tool-format", "hermes", "--max-model-len", "2048") as url:
        yield url


def run(command: list[str], **variables: str) -> None:
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("ok"), done.stdout + done.stderr


@pytest.mark.parametrize("name", ["litellm", "instructor", "langchain", "llm"])
def test_python(url: str, name: str) -> None:
    """A scripted session with the library, streaming and tools included."""
    python = os.environ.get("OCTAVO_CLIENTS")
    if python is None:
        pytest.skip("OCTAVO_CLIENTS is not set to an interpreter that has the client libraries")
    run([python, str(HERE / f"session_{name}.py"), url, "smollm2"])


def test_node(url: str, tmp_path: Path) -> None:
    """The same with the Node client."""
    prefix, node = os.environ.get("OCTAVO_NODE"), shutil.which("node")
    if prefix is None or node is None:
        pytest.skip("OCTAVO_NODE is not set to a folder with node_modules/openai, or there is no node")
    script = tmp_path / "session.mjs"
    script.write_text((HERE / "session_openai.mjs").read_text())
    (tmp_path / "node_modules").symlink_to(Path(prefix, "node_modules").absolute())
    run([node, str(script), url, "smollm2"])

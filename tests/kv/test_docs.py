"""The example in docs/kv.md runs as it stands."""

from pathlib import Path


def test_the_example_engine_runs() -> None:
    """Forty lines against the public names; the second prompt reuses the first."""
    text = (Path(__file__).parents[2] / "docs" / "kv.md").read_text()
    section = text.split("## Another engine", 1)[1].split("\n## ", 1)[0]
    code = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    ") or not line)
    names: dict[str, object] = {}
    exec(compile(code, "docs/kv.md", "exec"), names)
    assert names["first"] == ([7] * 8, 0)
    assert names["second"] == ([7] * 8, 100)
    assert names["pool"].stats().held == 0  # type: ignore[attr-defined]

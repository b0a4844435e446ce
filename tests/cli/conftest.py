"""Fixtures: the commands over a fake engine, so that nothing is loaded."""

from __future__ import annotations

import pytest

from tests.server.fake_engine import FakeEngineThread


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngineThread:
    """The fake that commands get; `configs` collects what they asked to load."""
    thread = FakeEngineThread()

    def load(config: object) -> object:
        thread.configs.append(config)
        return thread.engine

    def start(_: object) -> FakeEngineThread:
        thread.start()
        return thread

    monkeypatch.setattr("octavo.cli.loading.load_engine", load)
    monkeypatch.setattr("octavo.cli.loading.start_thread", start)
    return thread

"""Chromium without a screen, for the tests of the memory map."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def browser(profile: Path, **options: Any) -> Iterator[Any]:
    """A page in a new profile; fails at the end if it wrote an error to the console or raised one.

    `page.problems` may be emptied by a test that expects some.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("chromium (Debian: chromium) is not here")
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            profile, executable_path=CHROMIUM, headless=True, args=FLAGS, **options
        )
        page = context.pages[0]
        problems: list[str] = []
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.problems = problems
        try:
            yield page
        finally:
            context.close()
        assert problems == []

"""Settings for all tests."""

import logging
import os
from collections.abc import Iterator

import pytest

# Before torch is imported. Tiny products gain nothing from a second thread, and two threads on a
# machine that others use too spend their time waiting for each other. A proof may set its own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LOGGERS = ("octavo", "octavo.access", "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")


def _writers() -> dict[str, list[logging.Handler]]:
    """The handlers with a stream that each of LOGGERS has; pytest's own come and go."""
    return {
        name: [one for one in logging.getLogger(name).handlers if type(one) is logging.StreamHandler]
        for name in LOGGERS
    }


@pytest.fixture(autouse=True)
def _handlers_come_off() -> Iterator[None]:
    """Who writes logs in a test stops at its end: the stream is pytest's, which closes it, and later tests
    would print an error for each line."""
    before = _writers()
    yield
    assert _writers() == before

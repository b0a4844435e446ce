"""API keys: the file, constant-time look-up, and the limits of a key."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from octavo.engine import EngineConfig, Origin
from octavo.server import ServerConfig, create_app
from octavo.server.keys import ApiKey, KeyFileError, Keyring, read_keys

from .conftest import wait_for
from .fake_engine import FakeEngineThread

URL = "/v1/completions"


def write(directory: Path, text: str) -> Path:
    path = directory / "keys.toml"
    path.write_text(text)
    return path


def test_a_file_of_keys(tmp_path: Path) -> None:
    """Fields that are left out have their defaults; a digest stands for the key."""
    digest = hashlib.sha256(b"two").hexdigest()
    one, two = read_keys(
        write(
            tmp_path,
            '[[key]]\nname = "a"\nkey = "one"\n'
            f'[[key]]\nname = "b"\nkey_sha256 = "{digest}"\nweight = 2\nsalt = "s"\n'
            "max_concurrent = 3\nmax_tokens = 4\n",
        )
    )
    assert one == ApiKey("a", hashlib.sha256(b"one").digest(), 1.0, "a", None, None)
    assert two == ApiKey("b", hashlib.sha256(b"two").digest(), 2.0, "s", 3, 4)
    ring = Keyring([one, two])
    assert [ring.find(secret) for secret in (b"one", b"two", b"", b"three")] == [one, two, None, None]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no [[key]]"),
        ("key = 5", "no [[key]]"),
        ("x = ", "not TOML"),
        ("other = 1", "'other'"),
        ('[[key]]\nname = "a"', "key_sha256"),
        ('[[key]]\nname = "a"\nkey = "k"\nkey_sha256 = "ab"', "one of them"),
        ('[[key]]\nname = "a"\nkey_sha256 = "ab"', "64 hex"),
        ('[[key]]\nname = "a"\nkey = " k"', "space"),
        ('[[key]]\nname = "a"\nkey = ""', "not empty"),
        ('[[key]]\nname = "a b"\nkey = "k"', "name"),
        ('[[key]]\nkey = "k"', "name"),
        ('[[key]]\nname = "a"\nkey = "k"\nweight = 0', "weight"),
        ('[[key]]\nname = "a"\nkey = "k"\nweight = nan', "weight"),
        ('[[key]]\nname = "a"\nkey = "k"\nweight = true', "weight"),
        ('[[key]]\nname = "a"\nkey = "k"\nmax_concurrent = 0', "max_concurrent"),
        ('[[key]]\nname = "a"\nkey = "k"\nmax_tokens = 1.5', "max_tokens"),
        ('[[key]]\nname = "a"\nkey = "k"\nsalt = ""', "salt"),
        ('[[key]]\nname = "a"\nkey = "k"\nlimit = 1', "'limit'"),
        ('[[key]]\nname = "a"\nkey = "k"\n[[key]]\nname = "a"\nkey = "j"', "same name"),
        ('[[key]]\nname = "a"\nkey = "k"\n[[key]]\nname = "b"\nkey = "k"', "same secret"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, named: str) -> None:
    """A file that is not wholly understood is refused with its path and the field."""
    path = write(tmp_path, text)
    with pytest.raises(KeyFileError) as refused:
        read_keys(path)
    assert named in str(refused.value)
    assert str(path) in str(refused.value)


def test_every_key_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up compares whole digests with every key, found or not: its time tells nothing."""
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    monkeypatch.setattr("octavo.server.keys.hmac.compare_digest", watched)
    ring = Keyring([ApiKey.from_secret(secret, secret) for secret in ("a", "b", "c")])
    for secret in (b"a", b"c", b"nothing", b"a" * 10_000):
        compared.clear()
        ring.find(secret)
        assert len(compared) == 3
        assert {len(side) for pair in compared for side in pair} == {32}


def test_concurrent_requests_of_a_key(engine: FakeEngineThread) -> None:
    """A key's limit refuses its own excess with 429 and both numbers; other keys and GETs are not touched."""
    keys = (ApiKey.from_secret("a", "ann", max_concurrent=2), ApiKey.from_secret("b", "bob"))
    app = create_app(engine, ServerConfig(keys=keys))
    engine.stalled = True

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:

            def post(secret: str) -> asyncio.Task[httpx.Response]:
                headers = {"Authorization": f"Bearer {secret}"}
                return asyncio.create_task(client.post(URL, json={"prompt": "a"}, headers=headers))

            mine = [post("a"), post("a")]
            while engine.running < 2:
                await asyncio.sleep(0.01)
            refused = await post("a")
            assert refused.status_code == 429
            error = refused.json()["error"]
            assert error["code"] == "too_many_requests"
            assert "'ann'" in error["message"]
            assert "max_concurrent = 2" in error["message"]
            assert int(refused.headers["retry-after"]) >= 1
            assert (await client.get("/v1/models", headers={"Authorization": "Bearer a"})).status_code == 200
            others = post("b")
            while engine.running < 3:
                await asyncio.sleep(0.01)
            engine.stalled = False
            assert [(await answer).status_code for answer in (*mine, others)] == [200] * 3
            assert (await post("a")).status_code == 200  # its places are free again

    asyncio.run(run())
    wait_for(lambda: engine.running == 0)


def test_max_tokens_of_a_key(engine: FakeEngineThread) -> None:
    """A key's max_tokens is the most that may be asked for, and what is meant when nothing is asked for."""
    app = create_app(engine, ServerConfig(keys=(ApiKey.from_secret("a", "ann", max_tokens=4),)))

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        headers = {"Authorization": "Bearer a"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            answer = await client.post(URL, json={"prompt": "a"})
            assert answer.json()["usage"]["completion_tokens"] == 4
            refused = await client.post(URL, json={"prompt": "a", "max_tokens": 5})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "max_tokens"
            assert all(part in error["message"] for part in ("5", "4", "'ann'"))

    asyncio.run(run())


def test_whose_request_it_is(engine: FakeEngineThread) -> None:
    """The engine is told the key's name, whether somebody reads along, and the priority's sign is turned."""
    engine.engine.config = EngineConfig(schedule="priority")
    app = create_app(engine, ServerConfig(keys=(ApiKey.from_secret("a", "ann"),)))

    async def run() -> None:
        transport = httpx.ASGITransport(app)
        headers = {"Authorization": "Bearer a"}
        async with httpx.AsyncClient(transport=transport, base_url="http://x", headers=headers) as client:
            for fields in ({}, {"stream": True, "priority": -3}):
                assert (await client.post(URL, json={"prompt": "a", **fields})).status_code == 200

    asyncio.run(run())
    assert engine.origins == [Origin(tenant="ann", interactive=False), Origin(None, 3, "ann", True)]


def test_priority_without_a_schedule_for_it(engine: FakeEngineThread) -> None:
    """Where the schedule does not go by priority, one is refused with the option; 0 asks for nothing."""
    client = TestClient(create_app(engine))
    assert client.post(URL, json={"prompt": "a", "priority": 0}).status_code == 200
    refused = client.post(URL, json={"prompt": "a", "priority": 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"
    assert "--schedule priority" in refused.json()["error"]["message"]


def test_max_tokens_of_a_key_beyond_the_room(engine: FakeEngineThread) -> None:
    """Where nothing is asked for, a prompt that leaves less room than the key's limit gets that room."""
    client = TestClient(
        create_app(engine, ServerConfig(keys=(ApiKey.from_secret("a", "ann", max_tokens=50),)))
    )
    body = {"prompt": ["x" * 90, "y"]}
    answer = client.post(URL, json=body, headers={"Authorization": "Bearer a"})
    assert answer.status_code == 200, answer.text
    assert [params.max_tokens for _, params in engine.seen] == [10, 50]

"""What the machine and its cgroups allow, read from a made-up file system."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.engine import ConfigError, EngineConfig
from octavo.engine.config import DEFAULT_KV_MEMORY, Budget
from octavo.engine.memory import available_memory, resident_memory
from octavo.kv import KVShape, parse_bytes

GIB = 2**30


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {8 * 2**20} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, 8 * GIB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "5\n",
            },
            3 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon {GIB}\nfile {2 * GIB}\nactive_file 7\n"
                f"inactive_file {2 * GIB - 7}\n",
            },
            3 * GIB - 7,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{2 * GIB}",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": f"{2 * GIB}",
                "sys/fs/cgroup/memory/x/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
            },
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n1:cpu:/x\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{2 * GIB}",
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": "0",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
            },
            8 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "100",
                "sys/fs/cgroup/memory.current": "500",
            },
            0,
        ),
    ],
)
def test_the_least_of_machine_and_cgroups_counts(tmp_path: Path, files: dict[str, str], want: int) -> None:
    """cgroup v1 and v2, limits at any level, "max" and v1's huge number, usage above the limit, and files
    that are merely cached."""
    assert available_memory(system(tmp_path, files)) == want


def test_what_this_process_has(tmp_path: Path) -> None:
    """Read where the kernel writes it; unknown elsewhere."""
    assert resident_memory(system(tmp_path, {"proc/self/status": "Name: x\nVmRSS:\t   12 kB\n"})) == 12 * 1024
    assert resident_memory(tmp_path / "nowhere") is None
    block = bytearray(64 * 2**20)
    has = resident_memory()
    assert has is None or has > len(block)


def test_a_system_that_says_nothing_is_not_guessed(tmp_path: Path) -> None:
    """No /proc: None, not a number."""
    assert available_memory(tmp_path) is None


def test_without_an_option_or_a_known_memory_the_default_is_taken() -> None:
    """Nothing is said about memory, by options or by the system: the documented default, as it is."""
    shape = KVShape(30, 3, 64, 4)
    budget = Budget.plan(EngineConfig(), shape, 8192, available=None)
    assert budget.num_blocks == parse_bytes(DEFAULT_KV_MEMORY) // shape.bytes_per_block(budget.block_size)
    assert budget == Budget.plan(EngineConfig(kv_memory=DEFAULT_KV_MEMORY), shape, 8192, available=64 * GIB)


def test_a_cache_larger_than_memory_is_refused() -> None:
    """Need, have and the option are named."""
    shape = KVShape(30, 3, 64, 4)
    with pytest.raises(
        ConfigError, match=r"73,728,000,000 bytes \(100,000 blocks and 0 of host_cache\).*1,000.*num_blocks"
    ):
        Budget.plan(EngineConfig(num_blocks=100_000), shape, 8192, available=1000)
    with pytest.raises(ConfigError, match="lower kv_memory"):
        Budget.plan(EngineConfig(kv_memory="1TiB"), shape, 8192, available=GIB)

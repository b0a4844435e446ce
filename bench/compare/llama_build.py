"""llama.cpp's server built for this machine from the sources in llama-cpp-python's sdist; kept between runs.

    ROOT/llama_cpp_native/  sdist/  llama.cpp/ sources  build/  built.txt its recipe  models/ converted

Needs cmake and a C++ compiler; nothing is fetched but the sdist, through pip. Some ten CPU minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

SDIST = "llama-cpp-python==0.3.36"
INSIDE = "/vendor/llama.cpp/"
FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
TARGETS = ("llama-server", "llama-quantize")
VERSION = f"of the sdist {SDIST}, -march=native"


class BuildFailed(Exception):
    """The server could not be built; the message is the last line of what failed."""


def server(root: Path) -> Path:
    """The path of llama-server, built first if it is not there."""
    folder = root.absolute() / "llama_cpp_native"
    binary, done, wanted = (
        folder / "build/bin/llama-server",
        folder / "built.txt",
        repr((SDIST, FLAGS, TARGETS)),
    )
    if binary.exists() and done.exists() and done.read_text() == wanted:
        return binary
    if shutil.which("cmake") is None:
        raise BuildFailed("there is no cmake")
    print(f"building llama.cpp's server in {folder}", file=sys.stderr, flush=True)
    source, build = folder / "llama.cpp", folder / "build"
    if not (source / "CMakeLists.txt").exists():
        _unpack(folder)
    _call(["cmake", "-S", str(source), "-B", str(build), *FLAGS])
    jobs = str(len(os.sched_getaffinity(0)))
    _call(["cmake", "--build", str(build), "--target", *TARGETS, "--parallel", jobs])
    done.write_text(wanted)
    return binary


def converted(root: Path, model: Path, kind: str) -> Path:
    """The GGUF file with its weights as f32, f16 or bf16, made first if it is not there or older."""
    folder = root.absolute() / "llama_cpp_native"
    made = folder / "models" / f"{model.stem}.{kind}.gguf"
    if made.exists() and made.stat().st_mtime > model.stat().st_mtime:
        return made
    made.parent.mkdir(exist_ok=True)
    new = made.with_suffix(".new")
    _call(
        [str(folder / "build/bin/llama-quantize"), "--allow-requantize", str(model), str(new), kind.upper()]
    )
    new.replace(made)
    return made


def _unpack(folder: Path) -> None:
    """The sdist's copy of llama.cpp into folder/llama.cpp."""
    archives = folder / "sdist"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    _call([*pip, "-d", str(archives), SDIST])
    with tarfile.open(next(archives.glob("*.tar.gz"))) as archive:
        for member in archive.getmembers():
            _, found, rest = member.name.partition(INSIDE)
            if found and rest:
                member.name = rest
                archive.extract(member, folder / "llama.cpp", filter="data")


def _call(words: list[str]) -> None:
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
        raise BuildFailed(f"{words[0]}: {lines[-1] if lines else f'status {ended.returncode}'}")

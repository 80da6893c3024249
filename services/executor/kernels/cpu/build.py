"""Compiles the C++ kernels into one shared library for an instruction set level, and caches it.

Called by ``bindings`` at start, and as ``python -m services.executor.kernels.cpu.build FOLDER`` by image builds, which
ship the library for every level. Imports nothing of torch: the kernels take plain pointers.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

_log = logging.getLogger(__name__)


class Level(NamedTuple):
    """An instruction set: the CPU flags it needs, and how GCC and Clang are told."""

    flags: set[str]
    options: list[str]


SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
_V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
LEVELS = {
    "x86-64-v4-bf16": Level(_V4 | {"avx512_bf16"}, ["-march=x86-64-v4", "-mavx512bf16"]),
    "x86-64-v4": Level(_V4, ["-march=x86-64-v4"]),
    "x86-64-v3": Level({"avx2", "bmi2", "f16c", "fma"}, ["-march=x86-64-v3"]),
    "x86-64": Level(set(), ["-march=x86-64"]),
}
"""By name, best first. int8 products besides look for VNNI when they run."""
_NATIVE = Level(set(), ["-march=native"])


class NoCompilerError(RuntimeError):
    """No C++ compiler was found, or it cannot build the kernels."""


def level() -> str:
    """The best instruction set level of this machine; ``native`` where it is not an x86-64."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return "native"
    flags = set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        line = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
        flags = set(line.split())
    return next(name for name, needs in LEVELS.items() if needs.flags <= flags)


def shared_object(name: str) -> Path:
    """Path of the library for a level, compiled now unless an image or an earlier start has left it.

    Raises NoCompilerError.
    """
    prebuilt = PREBUILT / f"{name}.so"
    if prebuilt.exists():
        return prebuilt
    compiler = shutil.which(os.environ.get("CXX", "")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NoCompilerError("no C++ compiler found (CXX, g++ or clang++)")
    command = command_for(compiler, name)
    key = hashlib.sha256("\0".join([*command, *_source_texts()]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paternoster" / "kernels"
    target = cache / f"{name}-{key}.so"
    if not target.exists():
        _log.info("compiling the kernels for this CPU with %s, once", compiler)
        try:
            compile_library(command, target)
        except OSError as error:  # a folder that is read-only, a disk that is full
            raise NoCompilerError(f"cannot keep compiled kernels in {cache}: {error.strerror or error}") from error
    return target


def compile_library(command: list[str], target: Path) -> None:
    """Compile into ``target``, atomically: whoever finds the file finds it whole. Raises NoCompilerError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        done = subprocess.run([*command, "-o", str(built)], capture_output=True, text=True)
        if done.returncode:
            raise NoCompilerError(f"{command[0]} failed: {done.stderr.strip()[-500:]}")
        built.replace(target)


def command_for(compiler: str, name: str, *more: str) -> list[str]:
    """How the library of a level is compiled, but for where it goes; later options win."""
    flags = ["-O3", *LEVELS.get(name, _NATIVE).options, "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi"]
    return [compiler, *flags, *more, *(str(path) for path in sorted(SOURCES.glob("*.cpp")))]


def _source_texts() -> list[str]:
    return [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]


def _main(folder: str) -> None:
    names = LEVELS if level() != "native" else ["native"]
    for name in names:
        compile_library(command_for(os.environ.get("CXX", "g++"), name), Path(folder) / f"{name}.so")


if __name__ == "__main__":
    _main(sys.argv[1])

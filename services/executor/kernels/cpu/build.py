"""Compiles the C++ kernels into one shared library for an instruction set level, and caches it.

Called by ``bindings`` at start, and as ``python -m services.executor.kernels.cpu.build FOLDER`` by image builds, which
ship the library for every level. Imports nothing of torch: the kernels take plain pointers.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
PREBUILT = SOURCES / "prebuilt"
LEVELS = {
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "x86-64-v3": {"avx2", "bmi2", "f16c", "fma"},
    "x86-64": set[str](),
}
"""GCC's names of the x86-64 levels, best first, and the CPU flags each needs."""


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
    return next(name for name, needed in LEVELS.items() if needed <= flags)


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
    command = _command(compiler, name)
    key = hashlib.sha256("\0".join([*command, *_source_texts()]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paternoster" / "kernels"
    target = cache / f"{name}-{key}.so"
    if not target.exists():
        compile_library(command, target)
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


def _command(compiler: str, name: str) -> list[str]:
    flags = ["-O3", f"-march={name}", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi"]
    return [compiler, *flags, *(str(path) for path in sorted(SOURCES.glob("*.cpp")))]


def _source_texts() -> list[str]:
    return [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]


def _main(folder: str) -> None:
    names = LEVELS if level() != "native" else ["native"]
    for name in names:
        compile_library(_command(os.environ.get("CXX", "g++"), name), Path(folder) / f"{name}.so")


if __name__ == "__main__":
    _main(sys.argv[1])

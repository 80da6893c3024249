"""The compiled kernels under AddressSanitizer: no read or write beyond any tensor."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from services.executor.kernels.cpu import build

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_no_kernel_touches_memory_beyond_its_tensors(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    found = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    runtime = Path(found.stdout.strip())
    if not runtime.is_absolute():
        pytest.skip("g++ has no AddressSanitizer here")
    library = tmp_path / "kernels.so"
    command = build.command_for(compiler, build.level(), "-O1", "-g", "-fsanitize=address")
    build.compile_library(command, library)
    environment = os.environ | {
        "LD_PRELOAD": str(runtime.resolve()),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_WAIT_POLICY": "passive",
    }
    command = [sys.executable, "-m", "tests.kernels.sanitized", str(library)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "clean\n", done.stderr[-3000:]

"""A test that takes too long in a worker says where it was."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HANGS = """
import threading, pytest

@pytest.mark.timeout(1)
def test_waits_for_ever():
    threading.Event().wait()
"""


def test_a_worker_that_is_ended_tells_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    options = ["-n", "1", "--max-worker-restart", "0", "-p", "tests.timeouts", "-c", os.devnull, "--rootdir", tmp_path]
    command = [sys.executable, "-m", "pytest", *options, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert "in test_waits_for_ever" in done.stderr, done.stdout
    assert "crashed while running" in done.stdout

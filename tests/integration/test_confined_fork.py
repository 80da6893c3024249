"""What a fork may not do ends it alone. Tried in a process without threads, as the gateway's helpers are."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import itertools, json
from services.gateway.confined_fork import in_confined_fork

def spin():
    for _ in itertools.count():
        pass

def eat():
    return b"".join(bytes([1]) * 2**24 for _ in itertools.count())

def write():
    open("left-behind", "w").write("x" * 2**20)
    return b"written"

answers = [in_confined_fork(work) for work in (lambda: b"ok", spin, eat, write, lambda: 1 / 0, lambda: exit(0))]
print(json.dumps([None if answer is None else answer.decode() for answer in answers]))
"""


def test_only_what_keeps_within_bounds_has_an_answer(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, timeout=100)
    assert json.loads(process.stdout) == ["ok", None, None, None, None, None], process.stderr

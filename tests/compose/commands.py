"""Running other programs for the checks: bounded in time, their output kept and shown when they fail."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence

_BEGAN = time.monotonic()


def say(line: str) -> None:
    """Tell how far the checks are."""
    print(f"\n[{time.monotonic() - _BEGAN:5.0f} s] {line}", end="", flush=True)


def run(command: Sequence[str], *, timeout_s: float = 60, env: Mapping[str, str] | None = None) -> str:
    """Run to the end and return what it wrote to stdout; what goes wrong raises AssertionError with all its output."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=env,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = b"".join(part for part in (error.stdout, error.stderr) if isinstance(part, bytes))
        raise AssertionError(f"{' '.join(command)}: not within {timeout_s} s\n{output.decode()[-6000:]}") from None
    assert done.returncode == 0, (
        f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


def succeeds(command: Sequence[str], *, timeout_s: float = 60, env: Mapping[str, str] | None = None) -> bool:
    """Whether the program is there and ends with exit code 0 in time."""
    try:
        run(command, timeout_s=timeout_s, env=env)
    except (AssertionError, OSError):
        return False
    return True


def as_root() -> bool:
    """Whether this process may install programs and start an engine."""
    return os.geteuid() == 0

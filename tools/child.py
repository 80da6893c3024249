"""One child process: started so that it cannot outlive its parent, its output forwarded line by line.

Called by ``tools.supervisor``. Imports the standard library only.
"""

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_LONGEST_LINE = 64 * 1024
_LOG_LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} [A-Z]+ \S|\{\"time\": ")
"""How ``shared.log`` begins a line: clock, level and the process's name; or a JSON object."""
_OUTPUT_GRACE_S = 1.0
"""How long after a child's death its last lines are waited for (a grandchild may hold the pipe open)."""


@dataclass(frozen=True)
class ChildSpec:
    """What to start: ``name`` is unique among the children, ``argv`` complete, ``extra_env`` on top of the base."""

    name: str
    argv: Sequence[str]
    extra_env: Mapping[str, str] = field(default_factory=dict)
    pass_fds: Sequence[int] = ()


def die_with(parent: int) -> Callable[[], None]:
    """Runs in the child before exec: the kernel kills the child when the thread that forked it ends."""

    def prepare() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # the parent ended before the kernel knew of our wish
                os._exit(1)

    return prepare


class Child:
    """A running child process. ``write`` receives each line of its output, without the newline."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, write: Callable[[str], None]) -> None:
        self.spec = spec
        self.started_at = time.monotonic()
        self.last_line = ""
        self._process = process
        self._write = write
        self._output = asyncio.create_task(self._forward())

    @classmethod
    async def start(cls, spec: ChildSpec, env: Mapping[str, str], write: Callable[[str], None]) -> "Child":
        """Start it in a session of its own (a terminal's Ctrl-C does not reach it), with output to us.

        Must be called from the main thread: the child dies with the thread that started it. Raises OSError.
        """
        process = await asyncio.create_subprocess_exec(
            *spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**env, **spec.extra_env},
            pass_fds=tuple(spec.pass_fds),
            start_new_session=True,
            preexec_fn=die_with(os.getpid()),
        )
        return cls(spec, process, write)

    @property
    def pid(self) -> int:
        """Process id; also the id of its process group."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Exit code (negative: the signal that ended it), once its last lines are written."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._output, _OUTPUT_GRACE_S)
        return code

    def terminate(self) -> None:
        """Ask it to leave; nothing happens when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and whatever it has started, now."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def _forward(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        while data := await self._process.stdout.read(_LONGEST_LINE):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._line(line)
            if len(rest) > _LONGEST_LINE:
                self._line(rest)
                rest = b""
        if rest:
            self._line(rest)

    def _line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        if not line:
            return
        self.last_line = line
        self._write(line if _LOG_LINE.match(line) else f"{self.spec.name}: {line}")

"""Keeps a set of child processes running: a dead one is started again, one that cannot start ends everything.

Called by ``tools.up``. Which deaths are worth another start is decided in ``tools.restarts``.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tools.child import Child, ChildSpec
from tools.restarts import Restarts

_LEFT_AS_ASKED = (0, -signal.SIGTERM)
"""SIGTERM's own exit is that of a child which was still starting and had no handler yet."""


@dataclass(frozen=True)
class GaveUp:
    """A child that cannot start: its name, its exit code (negative: a signal) and the last line it wrote."""

    name: str
    code: int
    last_line: str

    def __str__(self) -> str:
        said = f"; its last line: {self.last_line}" if self.last_line else ""
        return f"{self.name} cannot start ({describe_exit(self.code)}){said}"


def describe_exit(code: int) -> str:
    """``exit code 1``, or ``killed by SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class Supervisor:
    """Owns every child process of this one.

    ``env`` is the children's environment. ``write`` receives their output, ``log`` our own remarks and ``warn`` those
    on children that died, line by line.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        write: Callable[[str], None],
        log: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._env = env
        self._write = write
        self._log = log
        self._warn = warn
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, Child] = {}
        self._leaving: dict[str, asyncio.Event] = {}
        self._was_ready = False
        self.gave_up: asyncio.Future[GaveUp] = asyncio.get_running_loop().create_future()

    def keep_running(self, spec: ChildSpec) -> None:
        """Start a child and start it again whenever it ends, until it is stopped."""
        assert spec.name not in self._keepers, f"two children named {spec.name}"
        self._leaving[spec.name] = asyncio.Event()
        self._keepers[spec.name] = asyncio.create_task(self._keep(spec))

    def now_ready(self) -> None:
        """The system as a whole works: from now on no number of deaths is a reason to give up."""
        self._was_ready = True

    async def stop(self, names: Iterable[str], grace_s: float) -> bool:
        """Send SIGTERM to these children and wait for them; kill what is left after ``grace_s``.

        Returns whether all of them left by themselves with code 0 or had ended before.
        """
        names = list(names)
        asked = self._let_go(names, Child.terminate)
        if not names:
            return True
        _, late = await asyncio.wait([self._keepers[name] for name in names], timeout=grace_s)
        if late:
            for child in self._let_go(names, Child.kill):
                self._warn(f"{child.spec.name} did not leave within {grace_s:g} s: killed")
            await asyncio.wait(late)
        return not late and all(child.exit_code in _LEFT_AS_ASKED for child in asked)

    async def kill_all(self) -> None:
        """End every child now."""
        self._let_go(self._keepers, Child.kill)
        if self._keepers:
            await asyncio.wait(self._keepers.values())

    def _let_go(self, names: Iterable[str], how: Callable[[Child], None]) -> list[Child]:
        """End these children's runs by ``how`` and start them no more; returns those that were running."""
        for name in names:
            self._leaving[name].set()
        running = [self._running[name] for name in names if name in self._running]
        for child in running:
            how(child)
        return running

    async def _keep(self, spec: ChildSpec) -> None:
        restarts = Restarts()
        leaving = self._leaving[spec.name]
        while not leaving.is_set():
            code, lived_s, last_line = await self._run_once(spec)
            if leaving.is_set():
                return
            delay_s = restarts.delay_after(code, lived_s, self._was_ready)
            if delay_s is None:
                if not self.gave_up.done():
                    self.gave_up.set_result(GaveUp(spec.name, code, last_line))
                return
            self._warn(f"{spec.name} ended ({describe_exit(code)}); starting it again in {delay_s:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(leaving.wait(), delay_s)

    async def _run_once(self, spec: ChildSpec) -> tuple[int, float, str]:
        """Exit code, seconds it lived, last line it wrote."""
        try:
            child = await Child.start(spec, self._env, self._write)
        except OSError as error:
            return 1, 0.0, str(error)
        self._running[spec.name] = child
        self._log(f"{spec.name} started (pid {child.pid})")
        if self._leaving[spec.name].is_set():  # asked to leave while it was being started
            child.kill()
        code = await child.wait()
        del self._running[spec.name]
        return code, time.monotonic() - child.started_at, child.last_line

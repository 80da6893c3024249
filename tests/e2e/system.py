"""A whole system for tests: ``paternoster up`` as a user starts it, on free ports, with what tests want to know of it.

Called by the fixtures of ``tests/e2e/conftest.py``. Nothing here knows a service from the inside.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import psutil

from tests.fakes.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
TIED = [sys.executable, "-I", "-S", str(Path(__file__).with_name("tied.py"))]
Role = Literal["gateway", "scheduler", "executor"]
START_S = 240.0
"""Longest a test waits for processes to start; where many tests run at once it takes minutes."""
_LEAVE_S = 60.0
"""Longest a test waits for a system to leave."""
_IDLE_S = 60.0


class System:
    """One ``paternoster up``: start it, talk to it, hurt it, stop it.

    ``options`` are those of ``up``: ``System(max_lanes=4, debug_endpoints=True)``. Ports are free ones unless given.
    """

    def __init__(
        self,
        backend: str = "fake",
        faults: Mapping[str, Any] | None = None,
        env: Mapping[str, str] = {},
        **options: Any,
    ) -> None:
        chosen = {"backend": backend, "port": 0, "link_port": 0, "metrics_port": 0, "debug_endpoints": True} | options
        self.api_key = next(iter(_as_list(chosen.get("api_key"))), "none")
        self._argv = [*TIED, sys.executable, "-m", "tools.main", "up", *_arguments(chosen)]
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("PATERNOSTER_")} | dict(
            env
        )
        if faults is not None:
            self._env["PATERNOSTER_FAULTS"] = json.dumps(faults)
        self._lines: list[str] = []
        self._known_children: set[psutil.Process] = set()

    def start(self, timeout_s: float = START_S) -> "System":
        """Start it and wait until it serves. Fails the test with its log when it does not."""
        self.launch()
        wait_until(lambda: self.base_url or not self.running, timeout_s, "the system serves")
        assert self.base_url, f"up ended with {self.up.wait()}:\n{self.log}"
        return self

    def launch(self) -> "System":
        """Start it and return at once."""
        self.up = subprocess.Popen(
            self._argv,
            cwd=ROOT,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="system log", daemon=True)
        self._reader.start()
        return self

    @property
    def running(self) -> bool:
        """Whether ``up`` itself lives."""
        return self.up.poll() is None

    @property
    def log(self) -> str:
        """All that it has written so far."""
        return "\n".join(self._lines)

    @property
    def base_url(self) -> str:
        """``http://127.0.0.1:PORT`` once it has said that it is ready; empty before."""
        found = re.search(r"ready: .* at (https?://\S+)", self.log)
        return found[1] if found else ""

    @property
    def model(self) -> str:
        """Name of the served model, as it says itself."""
        found = re.search(r"ready: (\S+) on ", self.log)
        assert found, "the system is not ready"
        return found[1]

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, without its own retries unless asked for."""
        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key=self.api_key, **{"max_retries": 0} | options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The official asynchronous client, without its own retries unless asked for."""
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key=self.api_key, **{"max_retries": 0} | options)

    def get(self, path: str) -> httpx.Response:
        """A plain GET on a connection of its own."""
        return httpx.get(f"{self.base_url}{path}", timeout=30, headers={"Authorization": f"Bearer {self.api_key}"})

    def debug_state(self) -> dict[str, Any]:
        """What /debug/state says; with several gateways that of whichever answers."""
        answer = self.get("/debug/state")
        assert answer.status_code == 200, answer.text
        state: dict[str, Any] = answer.json()
        return state

    def is_idle(self) -> bool:
        """Nothing waits or runs, no stream is open, and no lane or block is in use."""
        state = self.debug_state()
        executors = state["scheduler"]["executors"]
        return (
            state["gateway"]["streams"] == 0
            and state["scheduler"]["waiting"] == 0
            and state["scheduler"]["running"] == 0
            and all(
                executor["lanes"]["used"] == 0
                and executor["inflight"] == 0
                and executor["blocks"]["free"] + executor["blocks"]["cached"] == executor["blocks"]["total"]
                for executor in executors
            )
        )

    def wait_idle(self) -> None:
        """Wait until nothing is held; fails the test, telling what is, when that never comes."""
        try:
            wait_until(self.is_idle, _IDLE_S, "the system is idle")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.debug_state()}") from None

    def wait_ready(self) -> None:
        """Wait until /ready says 200 (again)."""

        def ready() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return self.get("/ready").status_code == 200
            return False

        wait_until(ready, START_S, "/ready says 200")

    def pids(self, role: Role) -> list[int]:
        """Process ids of this role's processes that live now, in the order of their names."""
        named = [
            (command[command.index(role) :], process.pid) for process, command in self._children() if role in command
        ]
        return [pid for _, pid in sorted(named)]

    def kill(self, role: Role, number: signal.Signals = signal.SIGKILL, index: int = 0) -> int:
        """Send a signal to one process of this role; returns its process id."""
        pid = self.pids(role)[index]
        os.kill(pid, number)
        return pid

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = _LEAVE_S) -> None:
        """Ask it to leave; fails the test unless it leaves with code 0 and leaves nothing behind."""
        self._children()
        self.up.send_signal(number)
        code = self.wait(timeout_s)
        assert code == 0, f"up ended with {code}:\n{self.log}"

    def wait(self, timeout_s: float = _LEAVE_S) -> int:
        """Exit code of ``up``; fails the test when it does not end or a process of it is left."""
        try:
            code = self.up.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"up has not ended within {timeout_s} s:\n{self.log}") from None
        self._reader.join(5)
        wait_until(lambda: not self.left_behind(), 5, f"no process is left: {self.left_behind()}")
        return code

    def left_behind(self) -> list[psutil.Process]:
        """Processes ever seen as children of ``up`` that still live."""
        return [process for process in self._known_children if _lives(process)]

    def close(self) -> None:
        """End what is left, whatever state it is in; for the end of a test that has failed or did not stop it."""
        if not hasattr(self, "up"):
            return
        self._children()
        if self.running:
            self.up.kill()
        self.up.wait(10)
        for process in self.left_behind():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._reader.join(5)
        if self.up.stdout is not None:
            self.up.stdout.close()

    def _children(self) -> list[tuple[psutil.Process, list[str]]]:
        """Living child processes with their command lines; remembers them for ``left_behind``."""
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.up.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._known_children.add(process)
                    if _lives(process):
                        found.append((process, process.cmdline()))
        return found

    def _read(self) -> None:
        assert self.up.stdout is not None
        with contextlib.suppress(ValueError):  # closed under us by close()
            for line in self.up.stdout:
                self._lines.append(line.rstrip("\n"))


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Options of ``up`` as arguments: True is a switch, a list repeats the option, None and False leave it out."""
    arguments = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif value is not False:
            arguments += [f"{flag}={each}" for each in _as_list(value)]
    return arguments

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from tests.fakes.waiting import await_until, wait_until
from tools import restarts
from tools.child import ChildSpec
from tools.supervisor import Supervisor, describe_exit

ROOT = Path(__file__).resolve().parents[2]
LOYAL = (
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
)
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


def python(name: str, code: str) -> ChildSpec:
    return ChildSpec(name, [sys.executable, "-c", code])


def gone(pid: int) -> bool:
    """Whether the process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Log:
    """What children wrote and what the supervisor remarked."""

    def __init__(self) -> None:
        self.output: list[str] = []
        self.remarks: list[str] = []

    def pids(self, name: str) -> list[int]:
        return [int(line.split("pid ")[1][:-1]) for line in self.remarks if line.startswith(f"{name} started")]


def supervised(test: Callable[[Supervisor, Log], Awaitable[None]]) -> Log:
    """Run a test body with a supervisor on asyncio's own loop, as ``up`` does; nothing may be left afterwards."""
    log = Log()

    async def body() -> None:
        supervisor = Supervisor(dict(os.environ), log.output.append, log.remarks.append, log.remarks.append)
        try:
            await asyncio.wait_for(test(supervisor, log), 30)
        finally:
            await supervisor.kill_all()

    asyncio.run(body())
    names = {line.split()[0] for line in log.remarks if " started (pid" in line}
    assert not [pid for name in names for pid in log.pids(name) if psutil.pid_exists(pid)]
    return log


def test_a_dead_child_is_started_again() -> None:
    async def test(supervisor: Supervisor, log: Log) -> None:
        supervisor.now_ready()
        supervisor.keep_running(python("worker", LOYAL))
        await await_until(lambda: "worker: up" in log.output, 10, "the child is up")
        os.kill(log.pids("worker")[0], signal.SIGKILL)
        await await_until(lambda: log.output.count("worker: up") == 2, 10, "the child is up again")
        assert await supervisor.stop(["worker"], 5)

    log = supervised(test)
    assert "worker ended (killed by SIGKILL); starting it again in 0.1 s" in log.remarks


def test_a_child_that_cannot_start_is_given_up_with_its_last_line() -> None:
    async def test(supervisor: Supervisor, log: Log) -> None:
        supervisor.keep_running(python("worker", "raise SystemExit('no disk')"))
        given_up = await supervisor.gave_up
        assert str(given_up) == "worker cannot start (exit code 1); its last line: no disk"

    log = supervised(test)
    assert len(log.pids("worker")) == restarts.TRIES_BEFORE_READY


def test_a_program_that_is_not_there_is_given_up() -> None:
    async def test(supervisor: Supervisor, log: Log) -> None:
        supervisor.keep_running(ChildSpec("worker", ["/no/such/program"]))
        assert "No such file" in (await supervisor.gave_up).last_line

    supervised(test)


def test_a_configuration_error_is_given_up_at_once() -> None:
    async def test(supervisor: Supervisor, log: Log) -> None:
        supervisor.now_ready()
        supervisor.keep_running(
            python("worker", f"import sys; print('bad dtype'); sys.exit({restarts.CONFIGURATION_ERROR})")
        )
        given_up = await supervisor.gave_up
        assert (given_up.code, given_up.last_line) == (restarts.CONFIGURATION_ERROR, "bad dtype")

    assert len(supervised(test).pids("worker")) == 1


def test_a_child_that_does_not_leave_is_killed_after_the_grace() -> None:
    async def test(supervisor: Supervisor, log: Log) -> None:
        supervisor.keep_running(python("loyal", LOYAL))
        supervisor.keep_running(python("stubborn", STUBBORN))
        await await_until(lambda: len(log.output) == 2, 10, "both are up")
        assert not await supervisor.stop(["loyal", "stubborn"], 0.3)

    assert "stubborn did not leave within 0.3 s: killed" in supervised(test).remarks


def test_a_child_is_stopped_while_it_waits_to_be_started_again() -> None:
    async def test(supervisor: Supervisor, log: Log) -> None:
        supervisor.now_ready()
        supervisor.keep_running(python("worker", "raise SystemExit(1)"))
        await await_until(lambda: log.remarks[-1:] and log.remarks[-1].endswith("in 0.4 s"), 10, "it waits")
        assert await supervisor.stop(["worker"], 5)
        assert len(log.pids("worker")) == 3

    supervised(test)


def test_kill_all_ends_grandchildren_too() -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    grandchild: list[int] = []

    async def test(supervisor: Supervisor, log: Log) -> None:
        supervisor.keep_running(python("worker", code))
        await await_until(lambda: log.output, 10, "the grandchild is up")
        grandchild.append(int(log.output[0].split()[-1]))
        await supervisor.kill_all()

    supervised(test)
    wait_until(lambda: gone(grandchild[0]), 5, "the grandchild is gone")


def test_lines_are_forwarded_whole_with_the_name_in_front_of_those_that_have_none() -> None:
    code = (
        "import os, time\n"
        "os.write(2, b'12:00:00.123 INFO worker: a log line\\n')\n"
        "os.write(1, b'half a '); os.write(1, b'line\\n\\n')\n"
        "os.write(2, b'\\xff not text\\n'); os.write(1, b'x' * 200000 + b'\\n'); os.write(1, b'no newline')\n"
    )

    async def test(supervisor: Supervisor, log: Log) -> None:
        supervisor.keep_running(python("worker", code))
        await await_until(lambda: "worker: no newline" in log.output, 10, "all is written")

    output = supervised(test).output
    assert output[:3] == ["12:00:00.123 INFO worker: a log line", "worker: half a line", "worker: \ufffd not text"]
    assert sum(line.count("x") for line in output[3:]) == 200_000


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
def test_children_die_with_a_parent_that_is_killed() -> None:
    parent = f"""
import asyncio, os, signal, sys
from tools.child import ChildSpec
from tools.supervisor import Supervisor

async def main():
    supervisor = Supervisor(dict(os.environ), print, print, print)
    supervisor.keep_running(ChildSpec("worker", [sys.executable, "-c", {STUBBORN!r}]))
    await asyncio.sleep(3600)

asyncio.run(main())
"""

    async def test() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-u", "-c", parent, stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        assert process.stdout is not None
        started = (await asyncio.wait_for(process.stdout.readline(), 10)).decode()
        assert (await asyncio.wait_for(process.stdout.readline(), 10)).decode() == "worker: up\n"
        child = int(started.split("pid ")[1].rstrip(")\n"))
        process.kill()
        await process.wait()

        await await_until(lambda: gone(child), 5, "the child is gone")

    asyncio.run(test())


@pytest.mark.parametrize(
    ("code", "text"),
    [(3, "exit code 3"), (-9, "killed by SIGKILL"), (-15, "killed by SIGTERM"), (-200, "killed by signal 200")],
)
def test_describe_exit(code: int, text: str) -> None:
    assert describe_exit(code) == text

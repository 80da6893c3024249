"""The three kinds of process started by themselves, as on hosts apart, with keys on the links between them."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from shared.net import curve
from tests.e2e.system import ROOT, START_S
from tests.fakes.waiting import wait_until


class Part:
    """One process of the system and its log."""

    def __init__(self, *arguments: str) -> None:
        self.arguments = arguments
        self.start()

    def start(self) -> None:
        """Start it, the first time or again."""
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.main", *self.arguments],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        self.lines += (line for line in process.stderr)

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def says(self, pattern: str) -> re.Match[str] | None:
        """Where its log says so."""
        return re.search(pattern, "".join(self.lines))


StartPart = Callable[..., Part]


@pytest.fixture
def start_part() -> Iterator[StartPart]:
    parts: list[Part] = []

    def start(*arguments: str) -> Part:
        parts.append(Part(*arguments))
        return parts[-1]

    yield start
    for part in parts:
        part.end()


def complete(url: str) -> object:
    """What it answers; not ready (503) is no answer, also just after it was."""
    body = {"prompt": "hello", "max_tokens": 5, "seed": 1, "ignore_eos": True}
    answer = httpx.Response(503)

    def answered() -> bool:
        nonlocal answer
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        return answer.status_code != 503

    wait_until(answered, START_S, "it answers")
    assert answer.status_code == 200
    return answer.json()["choices"]


def test_with_keys_the_whole_system_works_and_a_stranger_is_kept_out(start_part: StartPart, tmp_path: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "tools.main", "keys", str(tmp_path), "here", "there"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert len(made.stdout.splitlines()) == 6

    def keys(name: str) -> list[str]:
        return [
            f"--curve-secret-file={tmp_path}/{name}.key_secret",
            f"--curve-scheduler-file={tmp_path}/scheduler.key",
        ]

    def scheduler(gateways: str, executors: str) -> Part:
        return start_part(
            "scheduler",
            f"--gateways-endpoint=tcp://127.0.0.1:{gateways}",
            f"--executors-endpoint=tcp://127.0.0.1:{executors}",
            f"--curve-secret-file={tmp_path}/scheduler.key_secret",
            f"--curve-clients={tmp_path}/clients",
            "--metrics-port=0",
        )

    first = scheduler("0", "0")
    wait_until(lambda: first.says("gateways at"), START_S, "the scheduler serves")
    found = first.says(r"gateways at (\S+:(\d+)), executors at (\S+:(\d+))")
    assert found
    common = ("--backend=fake", "--metrics-port=0")
    executor = start_part("executor", *common, f"--scheduler={found[3]}", *keys("here"))
    gateway = start_part("gateway", *common, f"--scheduler={found[1]}", "--port=0", *keys("there"))
    curve.make_keys(tmp_path / "elsewhere", ["stranger"])
    stranger = start_part("executor", *common, f"--scheduler={found[3]}", *keys("elsewhere/stranger"))
    wait_until(lambda: gateway.says("listening on"), START_S, "the gateway listens")
    listening = gateway.says(r"listening on (\S+)")
    assert listening
    url = listening[1]
    before = complete(url)
    why = "the key is not one of those"
    wait_until(lambda: stranger.says(f"refuses this executor.*{why}"), START_S, "the stranger is told")
    wait_until(lambda: first.says(f"refused a connection: {why}"), START_S, "the scheduler tells")
    assert not first.says("open to whoever reaches it"), "and it does not warn"

    first.end()
    second = scheduler(found[2], found[4])
    assert complete(url) == before
    executor.end()
    executor.start()
    assert complete(url) == before
    assert not [line for line in second.lines if "stranger" in line]


def test_links_without_keys_that_others_reach_are_warned_of(start_part: StartPart) -> None:
    anywhere = ("--gateways-endpoint=tcp://0.0.0.0:0", "--executors-endpoint=tcp://127.0.0.1:0")
    part = start_part("scheduler", *anywhere, "--metrics-port=0")
    wait_until(lambda: part.says("gateways at"), START_S, "the scheduler serves")
    assert part.says(r"WARNING .*tcp://0.0.0.0:\d+ is open to whoever reaches it")
    assert sum("is open to" in line for line in part.lines) == 1

"""The executor as a process: what it loads before it says hello, and how it ends."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.wire.executor import BatchResult, Shutdown, Work, batch_plan
from shared.wire.sampling import Constraint, Sampling
from tests.fakes.plans import admit, failed, sampled
from tests.fakes.scheduler_side import DEADLINE_S, EPOCH, SchedulerSide
from tests.fakes.waiting import await_until

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]

CHILD = """
import json, sys
from services.executor.main import run
from services.executor.options import ExecutorOptions
code = run(ExecutorOptions(**json.loads(sys.argv[1])))
heavy = {"torch", "transformers", "tokenizers", "safetensors"} & set(sys.modules)
print("heavy modules:", sorted(heavy), file=sys.stderr)
sys.exit(code)
"""


class Child:
    """One executor process, its log collected."""

    def __init__(self, faults: dict[str, Any] | None, options: dict[str, Any], log: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PATERNOSTER_")}
        if faults is not None:
            environment["PATERNOSTER_FAULTS"] = json.dumps(faults)
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CHILD, json.dumps({"name": "e", "backend": "fake", **options})],
                cwd=ROOT,
                env=environment,
                stderr=output,
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def exit_code(self) -> int:
        await await_until(lambda: self.process.poll() is not None, DEADLINE_S, "the executor to end")
        assert self.process.returncode is not None
        return self.process.returncode

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@asynccontextmanager
async def executor(
    tmp_path: Path, faults: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[SchedulerSide, Child]]:
    scheduler = SchedulerSide()
    child = Child(faults, {"scheduler": scheduler.endpoint, **options}, tmp_path / "executor.log")
    try:
        yield scheduler, child
    finally:
        child.kill()
        await scheduler.router.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 250))


def read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as reply:
        body: bytes = reply.read()
        return body


def boom(step: int = 1) -> Any:
    prompt = list(b"now boom")
    return batch_plan(EPOCH, step, 0, admits=[admit(0, prompt, [0])], work=[Work(0, 0, len(prompt), True)])


def rule(do: str) -> dict[str, Any]:
    return {"rules": [{"prompt_contains": "boom", "at_output_token": 0, "do": do}]}


def test_leaves_in_order_while_constraints_are_compiled(tmp_path: Path) -> None:
    """They are compiled outside of Python, and one that is done while Python ends would bring the process down."""
    some = [Constraint("json_schema", json.dumps({"type": "number", "multipleOf": 10_000 + i})) for i in range(40)]

    async def scenario() -> None:
        async with executor(tmp_path, max_lanes=40) as (scheduler, child):
            await scheduler.joined()
            admits = [admit(i, [1, 2], [i], sampling=Sampling(constraint=each)) for i, each in enumerate(some)]
            assert isinstance(await scheduler.ask(batch_plan(EPOCH, 0, -1, admits=admits)), BatchResult)
            child.process.send_signal(signal.SIGTERM)
            assert await child.exit_code() == 0

    run(scenario)


def test_serves_without_torch_and_leaves_on_sigterm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with executor(tmp_path, metrics_port=0) as (scheduler, child):
            await scheduler.joined()
            assert len(sampled(await scheduler.ask(boom()))) == 1
            child.process.send_signal(signal.SIGTERM)
            assert await child.exit_code() == 0
            assert scheduler.losses == ["goodbye"]
            assert "heavy modules: []" in child.log
            assert "boom" not in child.log

    run(scenario)


@pytest.mark.parametrize("do", ["exit", "hang"])
def test_deadly_faults_end_the_process(tmp_path: Path, do: str) -> None:
    """A step that hangs is cut off after its time limit."""

    async def scenario() -> None:
        async with executor(tmp_path, rule(do), step_timeout_s=0.3) as (scheduler, child):
            await scheduler.joined()
            scheduler.send(boom())
            assert await child.exit_code() == 1
            assert ("giving up" in child.log) == (do == "hang")
            assert scheduler.answers == []

    run(scenario)


def test_faults_of_one_request_leave_the_process_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with executor(tmp_path, rule("raise")) as (scheduler, child):
            await scheduler.joined()
            assert failed(await scheduler.ask(boom())).lanes == b"\0\0\0\0"
            answer = await scheduler.ask(batch_plan(EPOCH, 2, 1, retires=[0]))
            assert sampled(answer) == []
            assert child.process.poll() is None

    run(scenario)


def test_shutdown_is_obeyed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with executor(tmp_path) as (scheduler, child):
            await scheduler.joined()
            scheduler.send(Shutdown())
            assert await child.exit_code() == 0

    run(scenario)


def test_sigterm_is_obeyed_while_loading_and_in_a_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with executor(tmp_path, {"start_delay_s": 600}) as (scheduler, child):
            await await_until(lambda: "waiting 600 s" in child.log, DEADLINE_S, "loading to begin")
            child.process.send_signal(signal.SIGTERM)
            assert await child.exit_code() == 0
            assert scheduler.hellos == []
        async with executor(tmp_path, {"step_ms": 600_000}) as (scheduler, child):
            await scheduler.joined()
            scheduler.send(boom())
            await await_until(lambda: scheduler.beats and scheduler.beats[-1].busy_ms, DEADLINE_S, "the step to run")
            child.process.send_signal(signal.SIGTERM)
            assert await child.exit_code() == 0

    run(scenario)


@pytest.mark.parametrize(
    ("faults", "options", "complaint"),
    [
        ({"rulez": []}, {}, "PATERNOSTER_FAULTS"),
        (None, {"num_blocks": 0}, "num_blocks"),
        (None, {"scheduler": "nonsense"}, "nonsense"),
        (None, {"host": "256.0.0.1", "metrics_port": 1}, "metrics"),
    ],
)
def test_a_configuration_mistake_has_its_own_exit_code(
    tmp_path: Path, faults: dict[str, Any] | None, options: dict[str, Any], complaint: str
) -> None:
    async def scenario() -> None:
        async with executor(tmp_path, faults, **options) as (_, child):
            assert await child.exit_code() == 78
            assert complaint in child.log
            assert "Traceback" not in child.log

    run(scenario)


def test_health_answers_while_the_model_loads(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with executor(tmp_path, {"start_delay_s": 600}, metrics_port=0) as (_, child):
            await await_until(lambda: "waiting 600 s" in child.log, DEADLINE_S, "loading to begin")
            address = re.findall(r"(http://127.0.0.1:\d+)/metrics", child.log)[0]
            assert await asyncio.to_thread(read, f"{address}/health") == b"loading the model\n"

    run(scenario)

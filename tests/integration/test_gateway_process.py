"""The gateway as a process: how it starts, drains (OPS 44) and ends."""

import asyncio
import gc
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import msgspec
import pytest

from services.gateway.main import MISCONFIGURED, settle_collector
from services.gateway.text.fake_tokenizer import fake_tokenizer
from shared import fake_model
from tests.fakes.gateway_world import events_of, text_of
from tests.fakes.scripted_scheduler import ScriptedScheduler
from tests.fakes.waiting import await_until

REPOSITORY = Path(__file__).parents[2]


class Process:
    """A gateway process on an inherited socket, in front of a scheduler of the test's loop."""

    def __init__(self, scheduler: ScriptedScheduler, **options: object) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        fields = {"name": "g", "scheduler": scheduler.endpoint, "backend": "fake", "fd": listener.fileno(), **options}
        code = f"""
import sys
from services.gateway.main import run
from services.gateway.options import GatewayOptions
code = run(GatewayOptions(**{fields!r}))
assert not {{"torch", "triton"}} & sys.modules.keys()
sys.exit(code)
"""
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=REPOSITORY,
            pass_fds=[listener.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        listener.close()

    async def ended(self) -> tuple[int, str]:
        """Its exit code and log."""
        _, log = await asyncio.to_thread(self.process.communicate, None, 20)
        return self.process.returncode, log


@pytest.fixture(name="processes")
def _processes() -> Iterator[list[Process]]:
    """Processes to end, however the test ends."""
    started: list[Process] = []
    yield started
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate()


async def _drained(processes: list[Process], drain_timeout_s: float, num_signals: int) -> tuple[str, int, str]:
    """A stream is running when the signals come: its text, the exit code, the log."""
    async with (
        ScriptedScheduler(auto=False) as scheduler,
        httpx.AsyncClient(timeout=20) as http,
        httpx.AsyncClient(timeout=20) as kept,
    ):
        one = Process(scheduler, drain_timeout_s=drain_timeout_s)
        processes.append(one)
        await await_until(lambda: scheduler._router.peers() or one.process.poll() is not None, 60, "it joined")
        assert (await kept.get(f"{one.url}/health")).status_code == 200
        body = {"prompt": "a", "max_tokens": 5, "stream": True}
        stream = asyncio.create_task(http.post(f"{one.url}/v1/completions", json=body))
        await await_until(lambda: scheduler.runs, 5, "the stream runs")
        one.process.send_signal(signal.SIGTERM)
        await _until_draining(kept, one.url)
        if num_signals == 2:
            one.process.send_signal(signal.SIGTERM)
        elif drain_timeout_s > 1:
            scheduler.auto = True
            scheduler._keep_ticking()
        try:
            text = (await stream).text
        except httpx.HTTPError:
            text = ""
        code, log = await one.ended()
    return text, code, log


async def _until_draining(kept: httpx.AsyncClient, url: str) -> None:
    async with asyncio.timeout(5):
        while (await kept.get(f"{url}/ready")).status_code == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert (await kept.get(f"{url}/health")).status_code == 200
    response = await kept.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert response.status_code == 503
    assert response.headers["connection"] == "close"
    assert "retry-after" in response.headers


async def test_ops_44_sigterm_drains(processes: list[Process]) -> None:
    results = await asyncio.gather(
        _drained(processes, 30, 1),
        _drained(processes, 0.5, 1),
        _drained(processes, 30, 2),
    )
    (patient, patient_code, log), (cut, cut_code, _), (_, now_code, _) = results
    assert (patient_code, cut_code, now_code) == (0, 0, 0)
    assert len(text_of(events_of(patient)).split()) == 5
    assert "shutting down" in events_of(cut)[-2]["error"]["message"]
    assert cut.endswith("data: [DONE]\n\n")
    assert "Traceback" not in log


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as transformers writes it."""
    folder = tmp_path_factory.mktemp("model")
    fake_tokenizer()._model.save_pretrained(folder)
    return folder


async def test_a_gateway_with_a_model_folder_serves_without_torch(processes: list[Process], folder: Path) -> None:
    digest = sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    facts = msgspec.structs.replace(fake_model.facts(), model="m", tokenizer_digest=digest)
    async with ScriptedScheduler(facts=facts) as scheduler, httpx.AsyncClient(timeout=20) as http:
        one = Process(scheduler, backend="torch", model=str(folder), served_model_name="m")
        processes.append(one)
        await await_until(lambda: scheduler._router.peers() or one.process.poll() is not None, 60, "it joined")
        message = {"role": "user", "content": "hi"}
        answer = await http.post(f"{one.url}/v1/chat/completions", json={"messages": [message], "max_tokens": 3})
        assert answer.status_code == 200, answer.text
        one.process.send_signal(signal.SIGINT)
        code, log = await one.ended()
        assert (code, "Traceback" in log) == (0, False), log


def test_what_requests_hold_was_searched_for_garbage_again_and_again() -> None:
    threshold = gc.get_threshold()
    settle_collector()
    try:
        before = gc.get_stats()[0]["collections"]
        held = [[number] for number in range(10_000)]
        assert gc.get_stats()[0]["collections"] == before
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
    del held


def _exit_of(**options: object) -> tuple[int, str]:
    code = f"""
from services.gateway.main import run
from services.gateway.options import GatewayOptions
raise SystemExit(run(GatewayOptions(**{options!r})))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


def test_what_a_restart_will_not_mend_ends_with_78_and_one_line(tmp_path: Path) -> None:
    assert MISCONFIGURED == 78
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, log = _exit_of(name="g", backend="fake", port=port)
        assert (code, "cannot listen" in log, len(log.splitlines())) == (78, True, 1)
        code, log = _exit_of(name="g", backend="fake", port=0, metrics_port=port)
        assert (code, "cannot serve metrics" in log, len(log.splitlines())) == (78, True, 1)
    code, log = _exit_of(name="g", model=str(tmp_path), port=0)
    assert (code, "tokenizer" in log, len(log.splitlines())) == (78, True, 1)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"nothing": "here"}))
    assert _exit_of(name="g", model=str(tmp_path), port=0)[0] == 78


async def test_two_gateways_before_one_scheduler_with_metrics_ports_of_their_own(processes: list[Process]) -> None:
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    async with ScriptedScheduler() as scheduler, httpx.AsyncClient(timeout=20) as http:
        for port in ports:
            processes.append(Process(scheduler, metrics_port=port))
        await await_until(lambda: len(scheduler._router.peers()) == 2, 20, "both joined")
        for one, port in zip(processes, ports, strict=True):
            assert (await http.get(f"{one.url}/health")).status_code == 200
            assert "gateway_streams" in (await http.get(f"http://127.0.0.1:{port}/metrics")).text
            assert (await http.get(f"http://127.0.0.1:{port}/health")).status_code == 200
        processes[0].process.kill()
        await await_until(lambda: len(scheduler._router.peers()) == 1, 10, "the killed one is noticed")
        processes[1].process.send_signal(signal.SIGTERM)
        assert (await processes[1].ended())[0] == 0

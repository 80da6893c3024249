"""Keys, CORS, drain, metrics, logs, and the process itself: cases OPS 43-47 as far as the gateway alone shows them."""

import asyncio
import json
import logging
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

from services.gateway.main import MISCONFIGURED
from services.gateway.text.fake_tokenizer import fake_tokenizer
from shared import fake_model
from shared.api_keys import ApiKey, plain_key
from shared.wire.gateway import TenantLimits
from tests.fakes.gateway_world import events_of, text_of, world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler
from tests.fakes.waiting import await_until

REPOSITORY = Path(__file__).parents[2]
ORIGIN = "https://page.example"


async def test_without_the_key_only_health_and_ready_answer() -> None:
    async with world(ScriptedScheduler(), api_keys=("sk-one", "sk-two"), debug_endpoints=True) as w:
        for path in ("/health", "/ready"):
            assert (await w.http.get(path)).status_code == 200
        for path in ("/metrics", "/v1/models", "/v1/models/default", "/debug/state", "/nothing"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sk-one"}, {"api-key": "sk-one"}):
                response = await w.http.get(path, headers=headers)
                assert response.status_code == 401
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert (await w.complete()).status_code == 401
        for key in ("sk-one", "sk-two"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await w.http.get("/v1/models", headers=headers)).status_code == 200
        assert not w.scheduler.submits


async def test_ops_45_cors_is_outermost() -> None:
    async with world(ScriptedScheduler(), api_keys=("sk-one",), cors_origins=(ORIGIN,)) as w:
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
        }
        preflight = await w.http.options("/v1/chat/completions", headers={"Origin": ORIGIN, **asked})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        key = {"Authorization": "Bearer sk-one", "Origin": ORIGIN}
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 1}
        for path, content, headers, status in (
            ("/v1/chat/completions", body, key, 200),
            ("/v1/chat/completions", body, {"Origin": ORIGIN}, 401),
            ("/v1/chat/completions", {}, key, 400),
            ("/v1/nothing", {}, key, 404),
        ):
            response = await w.http.post(path, json=content, headers=headers)
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == ORIGIN
        foreign = await w.http.post("/v1/nothing", json={}, headers={**key, "Origin": "https://else.example"})
        assert "access-control-allow-origin" not in foreign.headers


async def test_ops_45_cors_is_off_by_default() -> None:
    async with world(ScriptedScheduler()) as w:
        response = await w.http.get("/health", headers={"Origin": ORIGIN})
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_debug_state() -> None:
    scheduler = ScriptedScheduler(auto=False)
    async with world(scheduler, debug_endpoints=True) as w:
        running = asyncio.create_task(w.complete(n=2))
        await await_until(lambda: len(scheduler.runs) == 2, 5, "both choices run")
        state = (await w.http.get("/debug/state")).json()
        assert state == {
            "gateway": {"name": "test", "streams": 2},
            "gateways": [],
            "scheduler": {"waiting": 0, "running": 2, "executors": []},
        }
        scheduler.auto = True
        scheduler._keep_ticking()
        await running
        assert (await w.http.get("/debug/state")).json()["gateway"]["streams"] == 0
    async with world(ScriptedScheduler()) as w:
        assert (await w.http.get("/debug/state")).status_code == 404


async def test_debug_state_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.api.ops.STATE_TIMEOUT_S", 0.05)
    async with world(ScriptedScheduler(), debug_endpoints=True) as w:
        w.scheduler.mute_state = True
        assert (await w.http.get("/debug/state")).status_code == 503


def _sample(metrics: str, name: str, *labels: str) -> float:
    """The sum of a metric's samples that carry all of ``labels``."""
    lines = [
        line for line in metrics.splitlines() if line.startswith((f"paternoster:{name}{{", f"paternoster:{name} "))
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


async def test_metrics_count_what_happened() -> None:
    scheduler = ScriptedScheduler()
    async with world(scheduler) as w:
        await w.complete(max_tokens=5, n=2)
        await w.chat(max_tokens=5, stream=True)
        await w.complete(prompt="")
        await w.http.get("/some/unknown/path")
        scheduler.script = lambda submit: Answer(reject=("queue_full", "full", 0))
        await w.complete()
        scheduler.script = lambda submit: Answer([300] * 10)
        scheduler.auto = False
        leaving = asyncio.create_task(w.complete(max_tokens=10))
        await await_until(lambda: scheduler.runs, 5, "it runs")
        leaving.cancel()
        await w.until_idle()
        metrics = (await w.http.get("/metrics")).text
        assert _sample(metrics, "generation_tokens_total") == 15
        assert _sample(metrics, "time_to_first_token_seconds_count") == 2
        assert _sample(metrics, "inter_token_latency_seconds_count") == 3 * 4
        assert _sample(metrics, "request_success_total", 'finished_reason="length"') == 3
        assert _sample(metrics, "request_success_total", 'finished_reason="abort"') == 1
        assert _sample(metrics, "http_requests_total", 'status="4xx"', 'route="/v1/completions"') == 3
        assert _sample(metrics, "http_requests_total", 'route="other"') == 1
        assert _sample(metrics, "gateway_streams") == 0
        assert _sample(metrics, "gateway_ready") == 1
        assert _sample(metrics, "request_params_n_sum") == 2 + 1 + 1
        assert _sample(metrics, "request_params_max_tokens_sum") == 5 + 5 + 10
        assert _sample(metrics, "request_max_num_generation_tokens_sum") == 5 + 5
        assert _sample(metrics, "request_time_per_output_token_seconds_count") == 3
        assert _sample(metrics, "http_request_duration_seconds_count", 'route="/v1/completions"') == 4


async def test_metrics_that_break_harm_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake in what measures")

    async with world(ScriptedScheduler()) as w:
        with monkeypatch.context() as patch:
            patch.setattr("prometheus_client.Histogram.observe", broken)
            patch.setattr("shared.tally.Tally.observe", broken)
            patch.setattr("prometheus_client.Counter.inc", broken)
            for stream in (True, False):
                answer = await w.complete(max_tokens=5, stream=stream)
                assert answer.status_code == 200
                assert "error" not in answer.text
        assert (await w.http.get("/metrics")).status_code == 200
        await w.until_idle()
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors
    assert len(errors) == len(set(errors))


async def test_ops_46_health_answers_while_long_texts_are_tokenized() -> None:
    scheduler = ScriptedScheduler(auto=False)
    async with world(scheduler) as w:
        w.gateway.tokenizer.most_chars = 0  # or their length alone would tell
        work = [asyncio.create_task(w.complete(prompt="many words " * 90_000)) for _ in range(3)]
        work.append(asyncio.create_task(w.http.post("/v1/completions", content=b'{"prompt": "' + b"a" * 5_000_000)))
        answered = 0
        while not all(task.done() for task in work):
            assert (await w.http.get("/health")).status_code == 200
            answered += 1
        assert [task.result().status_code for task in work] == [400] * 4
        assert answered > 10, "each of the four would hold it up at most once or twice, were it tokenized on the loop"


async def test_ops_47_no_log_line_quotes_a_request(caplog: pytest.LogCaptureFixture) -> None:
    secret = "SECRET-77"
    with caplog.at_level(logging.INFO):
        scheduler = ScriptedScheduler(lambda submit: Answer([*secret.encode()], "error", "executor error"))
        async with world(scheduler) as w:
            headers = {"Authorization": f"Bearer {secret}"}
            await w.complete(prompt=secret * 800)
            await w.complete(prompt=secret, stop_token_ids=[-1], headers=secret)
            await w.complete(prompt=secret, temperature=secret)
            await w.chat(messages=[{"role": "user", "content": secret}], stream=True)
            await w.chat(messages=[{"role": secret, "content": secret}], model=secret)
            await w.http.post("/v1/completions", content=secret, headers=headers)
            scheduler.auto = False
            leaving = asyncio.create_task(w.complete(prompt=secret))
            await await_until(lambda: scheduler.runs, 5, "it runs")
            leaving.cancel()
            await w.until_idle()
            for _ in range(50):
                await w.http.get("/health")
                await w.http.get("/metrics")
    assert secret not in caplog.text
    access = [record for record in caplog.records if record.name == "services.gateway.access"]
    assert len(access) == 7
    assert not any("/health" in record.getMessage() for record in access)


async def test_ops_47_a_crash_tells_its_place_but_not_its_words(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "-".join(["SECRET", "77"])  # the line of code that raises is in the log
    async with world(ScriptedScheduler()) as w:

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError(secret)

        with monkeypatch.context() as patch:
            patch.setattr(w.gateway.tokenizer, "encode", broken)
            response = await w.complete()
            assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        with monkeypatch.context() as patch:
            patch.setattr("services.gateway.text.detokenizer.ByteDetokenizer.decode", broken)
            for stream in (True, False):
                response = await w.complete(stream=stream)
                assert "internal_error" in response.text
        assert (await w.complete()).status_code == 200
        await w.until_idle()
    assert secret not in caplog.text
    assert "Traceback" in caplog.text


# The process.


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


async def test_each_key_is_a_tenant_of_its_own_and_no_key_reaches_the_scheduler() -> None:
    """Tenants share no prefix; ``cache_salt`` divides one tenant's further."""
    async with world(ScriptedScheduler(), api_keys=("sk-one", "sk-two")) as w:
        for key, fields in (("sk-one", {}), ("sk-two", {}), ("sk-one", {"cache_salt": "pepper"})):
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "hello", "max_tokens": 1, **fields}
            assert (await w.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        one, two, salted = w.scheduler.submits
        assert one.tenant == salted.tenant != two.tenant
        assert "" not in {one.tenant, two.tenant}
        assert "sk-" not in one.tenant + two.tenant
        assert (one.salt, two.salt, salted.salt) == ("", "", "pepper")


async def test_a_named_keys_tenant_and_limits_go_with_each_request() -> None:
    limits = TenantLimits(2.0, 60, 5000, 3)
    ann = ApiKey(plain_key("sk-ann").digest, "ann", limits)
    headers = {"Authorization": "Bearer sk-ann"}
    async with world(ScriptedScheduler(), api_keys=(ann, "sk-two")) as w:
        for n, status in ((3, 200), (4, 400)):
            body = {"prompt": "hello", "max_tokens": 1, "n": n}
            response = await w.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status
        assert response.json()["error"]["param"] == "n", "no later time would be better"
        two = {"Authorization": "Bearer sk-two"}
        await w.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1}, headers=two)
        told = [(submit.tenant, submit.limits) for submit in w.scheduler.submits]
        assert told == [("ann", limits)] * 3 + [(told[-1][0], None)]


async def test_choices_whose_prompts_are_more_than_a_minutes_tokens_are_400() -> None:
    """The scheduler would take the first of them and turn the others away, whenever they come."""
    ann = ApiKey(plain_key("sk-ann").digest, "ann", TenantLimits(tokens_per_minute=10))
    headers = {"Authorization": "Bearer sk-ann"}
    async with world(ScriptedScheduler(), api_keys=(ann,)) as w:
        for prompt, n, status in (
            ("hello", 2, 200),
            ("hello", 3, 400),
            (["hello!", "hello"], 1, 400),
            ("h" * 11, 1, 200),
        ):
            body = {"prompt": prompt, "max_tokens": 1, "n": n}
            response = await w.http.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == status, (prompt, n)
        assert len(w.scheduler.submits) == 3


async def test_a_request_above_its_keys_limits_is_429_before_the_first_byte() -> None:
    refusal = Answer(reject=("rate_limited", "the limit of 60 requests a minute is reached", 12_345))
    async with world(ScriptedScheduler(lambda submit: refusal)) as w:
        for stream in (False, True):
            response = await w.chat(stream=stream)
            assert (response.status_code, response.headers["retry-after"]) == (429, "13")
            assert response.json()["error"]["code"] == "rate_limited"
            assert response.json()["error"]["type"] == "rate_limit_error"


async def test_choices_of_one_prompt_are_a_group() -> None:
    async with world(ScriptedScheduler()) as w:
        await w.complete(prompt=["one", "two"], n=2, max_tokens=1)
        await w.complete(prompt=["one", "two"], max_tokens=1)
        groups = [submit.group for submit in w.scheduler.submits]
        assert groups[0] == groups[1] != groups[2] == groups[3]
        assert "" not in groups[:4]
        assert groups[4:] == ["", ""]
        assert w.scheduler.submits[0].tenant == ""


STRICT = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


async def test_every_answer_tells_browsers_and_caches_what_they_may_not_do() -> None:
    async with world(ScriptedScheduler(), api_keys=("sk-one",), cors_origins=(ORIGIN,)) as w:
        key = {"Authorization": "Bearer sk-one"}
        answers = [
            await w.http.get("/health"),
            await w.http.get("/nothing"),
            await w.http.get("/nothing", headers=key),
            await w.http.get("/metrics", headers=key),
            await w.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=key),
            await w.http.post("/v1/completions", content=b"[", headers=key),
            await w.http.options("/nothing", headers={"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}),
        ]
        assert [answer.status_code for answer in answers] == [200, 401, 404, 200, 200, 400, 200]
        for answer in answers:
            assert {name: answer.headers[name] for name in STRICT} == STRICT
            assert len(answer.headers.get_list("x-content-type-options")) == 1
        body = {"prompt": "a", "max_tokens": 1, "stream": True}
        stream = await w.http.post("/v1/completions", json=body, headers=key)
        assert stream.headers["cache-control"] == "no-cache"
        assert stream.headers["x-content-type-options"] == "nosniff"
        page = await w.http.get("/docs", headers=key)
        assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
        reader, writer = await asyncio.open_connection("127.0.0.1", w.port)
        writer.write(b"no http\r\n\r\n")
        assert b"\r\nx-content-type-options: nosniff\r\n" in await reader.readuntil(b"\r\n\r\n")
        writer.close()

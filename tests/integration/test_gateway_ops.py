"""CORS, metrics, logs and headers: cases OPS 43 and 45-47 as far as the gateway alone shows them."""

import asyncio
import logging

import httpx
import pytest

from shared import log
from tests.fakes.conversations import OTHER_APIS
from tests.fakes.gateway_world import World, world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler, says
from tests.fakes.waiting import await_until

ORIGIN = "https://page.example"


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


@pytest.mark.parametrize("path", OTHER_APIS)
async def test_what_another_api_answers_is_measured_and_logged_as_any_other(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with world(ScriptedScheduler(says("hello"))) as w:
            await w.post(path, **OTHER_APIS[path])
            metrics = (await w.http.get("/metrics")).text
    assert _sample(metrics, "http_requests_total", f'route="{path}"', 'status="2xx"') == 1
    assert _sample(metrics, "time_to_first_token_seconds_count") == 1
    assert any(f"{path} 200" in line and "output_tokens=6 finish=stop" in line for line in caplog.messages)


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


async def healths_while_refusing(w: World, work: list[asyncio.Task[httpx.Response]]) -> int:
    """How often ``/health`` answers, asked again and again, until each of four requests has got its 400."""
    answered = 0
    while not all(task.done() for task in work):
        assert (await w.http.get("/health")).status_code == 200
        answered += 1
    assert [task.result().status_code for task in work] == [400] * 4
    return answered


async def test_ops_46_health_answers_while_long_texts_are_tokenized() -> None:
    scheduler = ScriptedScheduler(auto=False)
    async with world(scheduler) as w:
        w.gateway.tokenizer.most_chars = 0  # or their length alone would tell
        work = [asyncio.create_task(w.complete(prompt="many words " * 90_000)) for _ in range(3)]
        work.append(asyncio.create_task(w.http.post("/v1/completions", content=b'{"prompt": "' + b"a" * 5_000_000)))
        answered = await healths_while_refusing(w, work)
        assert answered > 10, "each of the four would hold it up at most once or twice, were it tokenized on the loop"


async def test_ops_46_health_answers_while_long_conversations_are_read() -> None:
    many = [{"role": "user", "content": "a"}] * 49_998
    async with world(ScriptedScheduler(auto=False)) as w:
        work = [
            asyncio.create_task(w.chat(messages=[*many, {"role": "user"}])),
            asyncio.create_task(w.post("/v1/responses", input=[*many, {"role": "user"}])),
            asyncio.create_task(w.post("/v1/messages", messages=[*many, {"role": "user"}], max_tokens=1)),
            asyncio.create_task(w.complete(prompt=[*[1] * 3_000_000, -1])),
        ]
        answered = await healths_while_refusing(w, work)
        assert answered > 20, "each of the four would hold it up at most four times, were it read on the loop"


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


@pytest.mark.parametrize("given", [None, "mine-1"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_request_is_found_in_the_log_by_each_id_that_its_client_has(
    path: str, given: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    said = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    fields = {"input": "hi"} if path == "/v1/responses" else {**said, "max_tokens": 3}
    headers = {} if given is None else {"X-Request-Id": given}
    with caplog.at_level(logging.INFO, "services.gateway.access"):
        async with world(ScriptedScheduler()) as w:
            response = await w.http.post(path, json={"model": "default", **fields}, headers=headers)
    request_id, answer_id = response.headers["x-request-id"], response.json()["id"]
    assert given in (None, request_id)
    assert given is not None or answer_id.endswith(request_id)
    (line,) = caplog.records
    assert request_id in line.getMessage()
    assert answer_id in line.getMessage()
    told = getattr(line, log.FIELDS)
    assert (told["request_id"], told["answer_id"]) == (request_id, answer_id)


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

"""One trace through three processes, and logs for programs, on the fake backend."""

import json

import httpx

from tests.e2e.conftest import StartSystem
from tests.fakes.collector import Collector
from tests.fakes.waiting import wait_until

TRACE_ID, CLIENTS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def ask(url: str, prompt: str, traceparent: str = "") -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "seed": 1}
    headers = {"X-Request-Id": "mine"} | ({"traceparent": traceparent} if traceparent else {})
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=20)


def test_one_trace_through_three_processes_and_json_logs(start_system: StartSystem) -> None:
    with Collector() as collector:
        system = start_system(otlp_endpoint=collector.url, log_format="json")
        answer = ask(system.base_url, "SECRET-77", f"00-{TRACE_ID}-{CLIENTS_SPAN}-01")
        assert answer.status_code == 200
        assert ask(system.base_url, "unwanted", f"00-{TRACE_ID}-{CLIENTS_SPAN}-00").status_code == 200
        system.get("/health")
        system.stop()
    spans = {span.name: span for span in collector.spans}
    assert len(spans) == len(collector.spans) == 4
    http, queue, run, execute = (spans[name] for name in ("POST /v1/completions", "queue", "run", "execute"))
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    assert http.parent_id == CLIENTS_SPAN
    assert queue.parent_id == run.parent_id == http.span_id
    assert execute.parent_id == run.span_id
    services = [span.service for span in (http, queue, run, execute)]
    assert services == ["paternoster-gateway", *["paternoster-scheduler"] * 2, "paternoster-executor"]
    assert http.attributes["gen_ai.usage.completion_tokens"] == run.attributes["gen_ai.usage.completion_tokens"] == 5
    assert http.attributes["gen_ai.usage.prompt_tokens"] == 9
    assert http.attributes["gen_ai.request.temperature"] == 0.5
    assert http.attributes["http.response.status_code"] == 200
    assert 0 < http.attributes["gen_ai.latency.time_to_first_token"] <= http.attributes["gen_ai.latency.e2e"]
    assert run.events == ["on a lane", "first token"]
    assert (execute.attributes["computed_tokens"], execute.attributes["steps"]) == (9 + 4, 5)
    assert execute.seconds <= run.seconds <= http.seconds
    assert "SECRET" not in str(collector.spans) + system.log
    lines = [json.loads(line) for line in system.log.splitlines() if line.startswith("{")]
    (told, _) = [line for line in lines if line.get("route") == "/v1/completions"]
    assert told["message"].startswith("mine /v1/completions 200 ")
    assert (told["request_id"], told["status"], told["prompt_tokens"], told["output_tokens"]) == ("mine", 200, 9, 5)
    assert (told["finish"], told["level"], told["process"]) == ("length", "info", "gateway-0")
    assert 0 <= told["ttft_ms"] <= told["duration_ms"]
    assert {line["process"] for line in lines} >= {"up", "scheduler", "executor-0", "gateway-0"}
    assert all({"time", "level", "process", "logger", "message"} <= line.keys() for line in lines)


def test_a_collector_that_refuses_costs_spans_and_one_line_in_each_log(start_system: StartSystem) -> None:
    with Collector(status=500) as collector:
        system = start_system(otlp_endpoint=collector.url)
        for _ in range(20):
            assert ask(system.base_url, "hello").status_code == 200
        wait_until(lambda: system.log.count("takes no spans") == 3, 60, "every process has told of it")
        for _ in range(20):
            assert ask(system.base_url, "hello").status_code == 200
        system.stop()
    assert not collector.spans
    assert collector.num_posts >= 3
    assert system.log.count("takes no spans") == 3

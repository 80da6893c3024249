"""Spans where they are wanted, nothing where not, and no harm where the collector is not there."""

import socket
import subprocess
import sys
import time

import pytest
from prometheus_client import CollectorRegistry

from shared import tracing
from tests.fakes.collector import Collector
from tests.fakes.gateway_world import world
from tests.fakes.scripted_scheduler import ScriptedScheduler
from tests.fakes.waiting import wait_until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_without_an_endpoint_there_is_none_and_no_service_imports_the_sdk() -> None:
    assert tracing.tracing("", "gateway", "g", CollectorRegistry()) is None
    code = (
        "import sys, services.gateway.main, services.scheduler.main, services.executor.main\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_spans_reach_the_collector_below_their_parents() -> None:
    registry = CollectorRegistry()
    with Collector() as collector:
        spans = tracing.Tracing(collector.url, "gateway", "g", registry)
        outer = spans.start("outer", PARENT, "server")
        inner = spans.start("inner", outer.traceparent)
        inner.event("halfway", {"n": 1})
        inner.fail("no")
        inner.end()
        inner.end()
        outer.end()
        stranger = spans.start("stranger", "nonsense")
        stranger.end()
        spans.close()
    seen = {span.name: span for span in collector.spans}
    assert seen["inner"].parent_id == seen["outer"].span_id
    assert seen["outer"].parent_id == PARENT.split("-")[2]
    assert seen["inner"].failed
    assert seen["inner"].events == ["halfway"]
    assert seen["stranger"].parent_id == ""
    assert registry.get_sample_value("paternoster:trace_spans_total") == 3
    assert registry.get_sample_value("paternoster:trace_spans_exported_total") == 3


def test_a_trace_that_its_client_does_not_want_goes_nowhere() -> None:
    with Collector() as collector:
        spans = tracing.Tracing(collector.url, "gateway", "g", CollectorRegistry())
        span = spans.start("outer", PARENT[:-1] + "0")
        assert span.traceparent == ""
        span.set({"a": 1})
        span.end()
        spans.close()
    assert not collector.spans


def test_a_collector_that_is_not_there_is_told_once_and_nobody_waits(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    registry = CollectorRegistry()
    spans = tracing.Tracing(f"http://127.0.0.1:{port}/v1/traces", "gateway", "g", registry)
    began = time.monotonic()
    for _ in range(5000):
        spans.start("lost").end()
    assert time.monotonic() - began < 10
    wait_until(lambda: caplog.records, 20, "it is told")
    began = time.monotonic()
    spans.close()
    assert time.monotonic() - began < tracing.LEAVE_S + 5
    assert [record.getMessage() for record in caplog.records if "no spans" in record.getMessage()]
    assert len(caplog.records) == 1
    assert registry.get_sample_value("paternoster:trace_spans_exported_total") == 0


@pytest.mark.parametrize("given", ["http://c:4318", "http://c:4318/", "http://c:4318/v1/traces"])
def test_an_endpoint_needs_no_path(given: str) -> None:
    assert tracing.address(given) == "http://c:4318/v1/traces"


async def test_spans_that_break_harm_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a mistake in what traces")

    with Collector() as collector:
        async with world(ScriptedScheduler(), otlp_endpoint=collector.url) as w:
            for place in ("Tracing.start", "Span.set", "Span.end"):
                with monkeypatch.context() as patch:
                    patch.setattr(f"shared.tracing.{place}", broken)
                    for stream in (True, False):
                        answer = await w.complete(stream=stream, max_tokens=3)
                        assert (answer.status_code, "error" in answer.text) == (200, False)
            await w.until_idle()

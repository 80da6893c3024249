"""``paternoster bench gateway`` on a real system; what it measured on a quiet machine is in docs/performance.md."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.fakes.gateway_world import world
from tests.fakes.scripted_scheduler import Answer, ScriptedScheduler
from tools.bench.gateway import run
from tools.bench.taps import RefusedError, taps


def test_the_file_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    assert run([4], 0.5, 5, str(tmp_path / "f.json")) == 0
    (row,) = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert row["streams"] == 4
    for name in ("tokens_per_s", "tokens_per_gateway_cpu_s", "tokens_per_scheduler_cpu_s", "requests_per_s"):
        assert row[name] > 0, name
    assert 0.5 < row["events_per_token"] < 2  # half a second is short: the two ends are not quite the same moment


def request(path: str = "/v1/completions") -> bytes:
    body = b'{"prompt": "a", "stream": true}'
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body


async def test_taps_count_events_answers_and_tokens_without_an_event() -> None:
    scheduler = ScriptedScheduler()
    answer = Answer([300, 0xC3, 0xA9, 301])  # three pieces of text, one of them of two tokens
    scheduler.script = lambda submit: answer if len(scheduler.submits) <= 20 else Answer(silent=True)
    async with world(scheduler) as w, taps("127.0.0.1", w.port, 2, lambda _: request()) as opened:
        opened.begin()
        async with asyncio.timeout(60):
            while sum(tap.num_answers for tap in opened) < 20:
                await opened.flow(0.01)
        assert sum(tap.num_events for tap in opened) == 20 * 5
        assert 1 <= opened.num_answers <= 20
        # An answer on each connection may have begun before the count.
        assert abs(opened.num_answers - opened.num_halves()) <= len(opened)


async def test_a_refusal_is_told() -> None:
    async with world(ScriptedScheduler()) as w:
        with pytest.raises(RefusedError, match="404"):
            async with taps("127.0.0.1", w.port, 1, lambda _: request("/nothing")):
                pass

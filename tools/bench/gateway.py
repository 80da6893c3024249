"""``paternoster bench gateway``: what a streamed token and a request cost the gateway and the scheduler.

A whole system with the fake backend streams to a client that only counts. CPU time is that of the processes themselves
(their threads and links included), so a busy machine makes it slow but hardly dear. Called by ``tools.bench.command``.
"""

import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from tools.bench.http import Server
from tools.bench.system import Running, StartError, system
from tools.bench.taps import LOOK_S, RefusedError, Taps, taps
from tools.environment import FAULTS
from tools.processes import children_environment

PROMPT_CHARS = 170
"""Tokens, too, with the fake backend."""
SHORT_TOKENS = 8
"""Output of the requests by which the cost of a request is told from that of its tokens."""
LONG_TOKENS = 8000
MAX_STEP_TOKENS = 1024
START_TIMEOUT_S = 240.0
SETTLE_S = 1.0


@dataclass(frozen=True)
class Row:
    """So many streams at once."""

    streams: int
    tokens_per_s: float
    tokens_per_gateway_cpu_s: float
    tokens_per_scheduler_cpu_s: float
    gateway_cpu_ms_per_request: float
    """Besides its tokens."""
    scheduler_cpu_ms_per_request: float
    requests_per_s: float
    """While the two before were measured."""
    events_per_token: float
    """Of the tokens that could have an event of their own."""
    client_cpu_share: float


@dataclass(frozen=True)
class Span:
    """What a stretch of time has cost and brought."""

    seconds: float
    gateway_s: float
    scheduler_s: float
    client_s: float
    tokens: float
    events: int
    halves: int
    answers: int


class Meter:
    """The CPU time of the services of one system, and the gateway's own count of tokens."""

    def __init__(self, up: Running) -> None:
        children = psutil.Process(up.pid).children()
        self._gateway = next(child for child in children if "gateway" in child.cmdline())
        self._scheduler = next(child for child in children if "scheduler" in child.cmdline())
        self._server = Server.at(up.url)

    async def span(self, opened: Taps, seconds: float) -> Span:
        """Measure from now on."""
        tokens = await self._tokens(opened)
        opened.begin()
        began, before = time.monotonic(), self._cpu()
        await opened.flow(seconds)
        took_s = time.monotonic() - began
        gateway_s, scheduler_s, client_s = (now - then for now, then in zip(self._cpu(), before, strict=True))
        tokens = await self._tokens(opened) - tokens
        events, answers = opened.num_events, opened.num_answers  # as soon after the answer as at the beginning
        return Span(took_s, gateway_s, scheduler_s, client_s, tokens, events, opened.num_halves(), answers)

    async def _tokens(self, opened: Taps) -> float:
        """All that the gateway has streamed; nothing piles up meanwhile."""
        asking = asyncio.create_task(self.metric("generation_tokens_total"))
        while not asking.done():
            await opened.flow(LOOK_S)
        return asking.result()

    def _cpu(self) -> tuple[float, float, float]:
        times = [process.cpu_times() for process in (self._gateway, self._scheduler)]
        gateway_s, scheduler_s = (each.user + each.system for each in times)
        return gateway_s, scheduler_s, time.process_time()

    async def metric(self, stem: str) -> float:
        """A figure of the gateway's."""
        reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
        try:
            writer.write(self._server.request("GET", "/metrics"))
            page = (await reader.read()).decode()
        finally:
            writer.close()
        found = re.search(rf"^paternoster:{stem}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def until_idle(self) -> None:
        """Return once the gateway holds no stream."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while await self.metric("gateway_streams"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def measure(streams: int, seconds: float, step_ms: float) -> Row:
    """One row, on a system of its own. Raises StartError, OSError and RefusedError."""
    arguments = {"backend": "fake", "max-lanes": streams, "max-step-tokens": streams + MAX_STEP_TOKENS}
    num_blocks = 2 * (streams + 1) * (LONG_TOKENS + PROMPT_CHARS) // 16
    environment = children_environment() | {FAULTS: json.dumps({"step_ms": step_ms})}
    async with system(arguments | {"num-blocks": num_blocks}, environment, START_TIMEOUT_S) as up:
        meter, server = Meter(up), Server.at(up.url)
        with _before_others():
            async with taps(server.host, server.port, streams, _requests(server, LONG_TOKENS)) as opened:
                await opened.flow(SETTLE_S)
                steady = await meter.span(opened, seconds)
            await meter.until_idle()
            async with taps(server.host, server.port, streams, _requests(server, SHORT_TOKENS)) as opened:
                brief = await meter.span(opened, seconds)
    return _row(streams, steady, brief)


def _requests(server: Server, max_tokens: int) -> Callable[[int], bytes]:
    def request(number: int) -> bytes:
        body = {
            "prompt": f"{number} ".ljust(PROMPT_CHARS, "."),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "skip_special_tokens": False,  # so that every token has text
            "stream": True,
        }
        return server.request("POST", "/v1/completions", body).replace(b"Connection: close", b"Connection: keep-alive")

    return request


@contextlib.contextmanager
def _before_others() -> Iterator[None]:
    """The client goes before everybody else on the machine, where it may: it must keep up."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _row(streams: int, steady: Span, brief: Span) -> Row:
    def per_request_ms(steady_s: float, brief_s: float) -> float:
        return round(1000 * (brief_s - brief.tokens * steady_s / steady.tokens) / max(1, brief.answers), 3)

    return Row(
        streams=streams,
        tokens_per_s=round(steady.tokens / steady.seconds, 1),
        tokens_per_gateway_cpu_s=round(steady.tokens / steady.gateway_s),
        tokens_per_scheduler_cpu_s=round(steady.tokens / steady.scheduler_s),
        gateway_cpu_ms_per_request=per_request_ms(steady.gateway_s, brief.gateway_s),
        scheduler_cpu_ms_per_request=per_request_ms(steady.scheduler_s, brief.scheduler_s),
        requests_per_s=round(brief.answers / brief.seconds, 1),
        events_per_token=round(steady.events / (steady.tokens - steady.halves), 4),
        client_cpu_share=round(steady.client_s / steady.seconds, 3),
    )


def run(streams: Iterable[int], seconds: float, step_ms: float, json_file: str) -> int:
    """Measure, print and write; returns the exit code."""
    rows = []
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            for number in streams:
                rows.append(runner.run(measure(number, seconds, step_ms)))
    except (StartError, RefusedError, OSError) as error:
        print(f"paternoster: error: {error}", file=sys.stderr)
        return 1
    table = Table(title=f"streams of the fake backend, a token each {step_ms:g} ms; {seconds:g} s each")
    table.add_column("")
    for _ in rows:
        table.add_column(justify="right")
    for name in asdict(rows[0]):
        table.add_row(name.replace("_", " "), *(str(getattr(row, name)) for row in rows))
    Console().print(table)
    if json_file:
        Path(json_file).write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0

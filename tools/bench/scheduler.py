"""``paternoster bench scheduler``: what one tick costs the scheduler, by the number of running requests.

A tick is ``handle`` of one step's result: its tokens are taken in and the next step is planned. Measured on the core
itself, with one executor whose lanes are all decoding, a queue that waits for a lane, and a pool full of cached blocks:
none of the last two may cost anything. Called by ``tools.bench.command``.
"""

import gc
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.scheduler.core.debug_state import debug_state
from services.scheduler.core.events import ExecutorJoined, GatewayJoined, StepDone, Submitted
from services.scheduler.core.limits import Settings
from services.scheduler.core.machine import Scheduler
from shared.wire import tokens
from shared.wire.executor import BatchResult, ExecutorHello
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Submit
from shared.wire.sampling import Sampling

GATEWAY, EXECUTOR = "gateway-0", "executor-0"
BLOCK_SIZE = 16
CONTEXT_LEN = 2**20
PROMPT_TOKENS = 16
CACHED_PROMPT_BLOCKS = 500
EOS = 1


@dataclass(frozen=True)
class Row:
    """Ticks with so many running requests."""

    running: int
    us_per_tick: float
    """Median."""
    us_per_request: float
    p99_us_per_tick: float
    queue: int
    cached_blocks: int


class Bench:
    """One scheduler with one executor, answered at once."""

    def __init__(self, running: int, queue: int, cached_blocks: int, ticks: int) -> None:
        self._ids = 1
        self._now_ms = 0
        own_blocks = running * (2 + (PROMPT_TOKENS + 4 * ticks) // BLOCK_SIZE)
        # The step is as wide as it must be for all to decode at once.
        limits = ExecutorLimits(
            int(1.02 * (own_blocks + cached_blocks)) + 64,
            BLOCK_SIZE,
            running,
            running + CACHED_PROMPT_BLOCKS * BLOCK_SIZE,
        )
        facts = ModelFacts("bench", 2**31 - 1, CONTEXT_LEN, [EOS], "bench")
        self.core = Scheduler(0, Settings(step_time_budget_ms=10**6))
        self.core.handle(GatewayJoined(GATEWAY), 0)
        self.core.handle(ExecutorJoined(EXECUTOR, ExecutorHello(EXECUTOR, 0, facts, limits, "none", "none")), 0)
        for _ in range(cached_blocks // CACHED_PROMPT_BLOCKS):
            self._submit(CACHED_PROMPT_BLOCKS * BLOCK_SIZE, 1)
            while self.core.ledger.num_running or self.core.ledger.num_waiting:
                self.tick()
        for _ in range(running + queue):
            self._submit(PROMPT_TOKENS, CONTEXT_LEN)
        while not self._all_decode(running):
            self.tick()

    def _submit(self, num_tokens: int, max_tokens: int) -> None:
        self._ids += 1
        prompt = tokens.pack([self._ids]) + bytes(4 * (num_tokens - 1))
        self.core.handle(Submitted(GATEWAY, Submit(str(self._ids), prompt, Sampling(), max_tokens)), self._now_ms)

    def _all_decode(self, running: int) -> bool:
        core = self.core.executors[EXECUTOR]
        return len(core.lanes) == running and all(len(step.samples) == running for step in core.inflight)

    def tick(self) -> int:
        """Answer the oldest step; returns the nanoseconds of CPU time that ``handle`` took."""
        core = self.core.executors[EXECUTOR]
        step = core.inflight[0]
        self._now_ms += 10
        sampled = bytes(len(step.sample_lanes))
        result = BatchResult(0, step.number, step.sample_lanes, step.sample_seqs, sampled, [], 10 + step.rows)
        event = StepDone(EXECUTOR, result)
        began_ns = time.thread_time_ns()
        self.core.handle(event, self._now_ms)
        return time.thread_time_ns() - began_ns


def measure(running: int, queue: int, cached_blocks: int, ticks: int) -> Row:
    """One row."""
    bench = Bench(running, queue, cached_blocks, ticks)
    gc.collect()
    for _ in range(ticks // 10):
        bench.tick()
    times_us = sorted(bench.tick() / 1000 for _ in range(ticks))
    median_us = statistics.median(times_us)
    state = debug_state(bench.core)
    return Row(
        running=running,
        us_per_tick=round(median_us, 1),
        us_per_request=round(median_us / running, 3),
        p99_us_per_tick=round(times_us[len(times_us) * 99 // 100], 1),
        queue=state["waiting"],
        cached_blocks=state["executors"][0]["blocks"]["cached"],
    )


def run(running: Iterable[int], queue: int, cached_blocks: int, ticks: int, json_file: str) -> int:
    """Measure, print and write; returns the exit code."""
    rows = [measure(number, queue, cached_blocks, ticks) for number in running]
    table = Table(title=f"CPU time of one tick, handle(result) and plan; {ticks} ticks each")
    for name in ("running", "us per tick", "us per request", "p99 us per tick", "queue", "cached blocks"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(str(value) for value in asdict(row).values()))
    Console().print(table)
    if json_file:
        Path(json_file).write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    return 0

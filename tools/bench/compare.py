"""``paternoster bench compare``: the picture of the lesson on the real system.

For each policy a whole system is started, everybody comes at once, and what every lane did in every step is read off
the scheduler's journal. Called by ``tools.bench.command``.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.scheduler.core.actions import Action
from services.scheduler.core.events import Event, Submitted
from services.scheduler.core.machine import Scheduler
from services.scheduler.core.snapshot import SnapshotError
from services.scheduler.journal_format import JournalError, Reader
from tools import replay
from tools.bench.client import Client, ServerError, first_model
from tools.bench.figures import Figures, Limits, summarize
from tools.bench.http import Server
from tools.bench.serve import closed_loop
from tools.bench.system import StartError, system
from tools.bench.workload import Calibration, Lengths, jobs
from tools.environment import FAULTS
from tools.occupancy import text
from tools.occupancy.page import Panel, page
from tools.occupancy.record import Recorder
from tools.processes import children_environment

FAKE_STEPS = {"step_ms": 10, "prefill_ms_per_token": 0.1}
"""What a step of the fake backend takes, unless the environment says otherwise."""
STATIC_WAIT_MS = 1000
"""Everybody comes at once, as quickly as a busy machine lets them: no batch shall be small for that."""


@dataclass(frozen=True)
class CompareOptions:
    """What to compare, on what load."""

    policies: list[str]
    backend: str
    model: str
    max_lanes: int
    max_inflight: int
    num_requests: int
    prompt_tokens: Lengths
    output_tokens: Lengths
    seed: int
    start_timeout_s: float
    picture: str
    """HTML file; empty is none."""
    steps: int
    """Of each picture."""
    json_file: str


@dataclass(frozen=True)
class Compared:
    """One policy's run."""

    policy: str
    figures: Figures
    recorder: Recorder
    steps: int


def run(options: CompareOptions) -> int:
    """Compare, print and write; returns the exit code."""
    compared = []
    try:
        for policy in options.policies:
            compared.append(asyncio.run(_measure(policy, options)))
            _say(compared[-1])
    except (StartError, ServerError, OSError, JournalError, SnapshotError, replay.Divergence) as error:
        print(f"paternoster: error: {error}", file=sys.stderr)
        return 1
    head, lines = _table(compared)
    table = Table(title=f"{options.num_requests} requests at once, {options.max_lanes} lanes, {options.backend}")
    for name in head:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    if options.picture:
        panels = [Panel(one.policy, _note(one), list(one.recorder.executors.values())) for one in compared]
        Path(options.picture).write_text(page("Policies on the real system", panels, (head, lines)))
    if options.json_file:
        Path(options.json_file).write_text(json.dumps(_as_json(compared), indent=2) + "\n")
    return 1 if any(one.figures.failed for one in compared) else 0


async def _measure(policy: str, options: CompareOptions) -> Compared:
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        async with system(_arguments(policy, journal, options), _environment(options), options.start_timeout_s) as up:
            figures = await _load(up.url, options)
        recorder, steps = _read(journal, options)
    return Compared(policy, figures, recorder, steps)


def _arguments(policy: str, journal: Path, options: CompareOptions) -> dict[str, Any]:
    return {
        "policy": policy,
        "static-batch-size": options.max_lanes,
        "static-wait-ms": STATIC_WAIT_MS,
        "max-lanes": options.max_lanes,
        "max-inflight": options.max_inflight,
        "backend": options.backend,
        "model": options.model,
        "journal": journal,
        "log-level": "warning",
    }


def _environment(options: CompareOptions) -> dict[str, str]:
    environment = children_environment()
    if options.backend == "fake":
        environment.setdefault(FAULTS, json.dumps(FAKE_STEPS))
    return environment


def _read(journal: Path, options: CompareOptions) -> tuple[Recorder, int]:
    """The picture of the load and its steps, without those requests that came before to find out about the server."""
    recorder = Recorder(1, options.steps)
    earlier = sum(isinstance(handled.event, Submitted) for handled in Reader(journal)) - options.num_requests
    before = 0

    def observe(scheduler: Scheduler, event: Event, now_ms: int, actions: list[Action]) -> None:
        nonlocal earlier, before
        earlier -= isinstance(event, Submitted)
        if earlier < 0:
            recorder.observe(scheduler, actions)
        else:
            before = scheduler.counters.steps

    replayed = replay.run(Reader(journal), observe)
    return recorder, replayed.scheduler.counters.steps - before


async def _load(url: str, options: CompareOptions) -> Figures:
    server = Server.at(url)
    client = Client(server, await first_model(server), False, True, 0.0, 3600.0)
    calibration = await Calibration.of(client.count_tokens, random.Random(options.seed))
    load = jobs(options.seed, calibration, options.prompt_tokens, options.output_tokens)
    cpu_before_s = time.process_time()
    outcomes = await closed_loop(client.run, load, options.num_requests, options.num_requests, None)
    return summarize(outcomes, Limits(), time.process_time() - cpu_before_s)


def _say(one: Compared) -> None:
    print(f"{one.policy}: {text.LEGEND}")
    for rows in one.recorder.executors.values():
        print(*text.draw(rows), sep="\n", flush=True)
    for reason, count in one.figures.failures.items():
        print(f"{count} requests failed: {reason}")


def _note(one: Compared) -> str:
    return f"busy share while others wait {_share(one)}, {one.figures.output_tokens_per_s:.0f} output tokens/s"


def _share(one: Compared) -> str:
    share = one.recorder.busy.share
    return "-" if share is None else f"{share:.3f}"


def _table(compared: Iterable[Compared]) -> tuple[list[str], list[list[str]]]:
    head = ["policy", "busy share", "tokens/s", "TTFT p50 p99 ms", "TPOT p50 p99 ms", "steps"]
    return head, [
        [
            one.policy,
            _share(one),
            f"{one.figures.output_tokens_per_s:.1f}",
            _two(one.figures.ttft_ms),
            _two(one.figures.tpot_ms),
            str(one.steps),
        ]
        for one in compared
    ]


def _two(values: dict[str, float | None]) -> str:
    return " ".join("-" if values[p] is None else f"{values[p]:.0f}" for p in ("p50", "p99"))


def _as_json(compared: Iterable[Compared]) -> dict[str, Any]:
    return {
        "policies": {
            one.policy: one.figures.as_json() | {"busy_share": one.recorder.busy.share, "steps": one.steps}
            for one in compared
        }
    }

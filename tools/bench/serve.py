"""``paternoster bench serve``: puts a load on a server and prints what its users would have felt.

Closed loop: a number of clients, each sending its next request when its last one has ended. Open loop: requests arrive
as a Poisson process, however slow the answers. Called by ``tools.main``.
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools.bench.client import Client, ServerError, first_model
from tools.bench.figures import Figures, Limits, Outcome, summarize
from tools.bench.http import Server
from tools.bench.workload import Calibration, Job, Lengths, arrivals, jobs

Run = Callable[[Job], Coroutine[Any, Any, Outcome]]


@dataclass(frozen=True)
class LoadOptions:
    """What load to put on whom; times in seconds unless named otherwise."""

    url: str
    model: str
    """Empty: the first one that the server offers."""
    api_key: str
    chat: bool
    concurrency: int
    rate: float | None
    """Requests a second; None is the closed loop."""
    prompt_tokens: Lengths
    output_tokens: Lengths
    num_requests: int | None
    duration_s: float | None
    """No new requests after this long; those running are waited for."""
    warmup: int
    seed: int
    ignore_eos: bool
    temperature: float
    timeout_s: float
    limits: Limits
    json_file: str


def run(options: LoadOptions) -> int:
    """Run the load test and print its figures; returns the exit code: 0, or 1 when no request went well."""
    try:
        figures, client = asyncio.run(_measure(options))
    except (ServerError, ValueError) as error:
        print(f"paternoster: error: {error}", file=sys.stderr)
        return 1
    _print(figures, options)
    if options.json_file:
        report = figures.as_json() | {"model": client.model, "load": _load_as_json(options)}
        Path(options.json_file).write_text(json.dumps(report, indent=2) + "\n")
    return 0 if figures.failed < figures.requests else 1


async def _measure(options: LoadOptions) -> tuple[Figures, Client]:
    server = Server.at(options.url, options.api_key)
    client = Client(
        server,
        options.model or await first_model(server),
        options.chat,
        options.ignore_eos,
        options.temperature,
        options.timeout_s,
    )
    calibration = await Calibration.of(client.count_tokens, random.Random(options.seed))
    warmup_load = jobs(options.seed + 1, calibration, options.prompt_tokens, options.output_tokens)
    await closed_loop(client.run, warmup_load, options.concurrency, options.warmup, None)
    load = jobs(options.seed, calibration, options.prompt_tokens, options.output_tokens)
    with _progress(options) as advance:

        async def measured(job: Job) -> Outcome:
            outcome = await client.run(job)
            advance(outcome)
            return outcome

        cpu_before_s = time.process_time()
        if options.rate is None:
            outcomes = await closed_loop(measured, load, options.concurrency, options.num_requests, options.duration_s)
        else:
            times = arrivals(options.seed, options.rate)
            outcomes = await open_loop(measured, load, times, options.num_requests, options.duration_s)
        cpu_s = time.process_time() - cpu_before_s
    return summarize(outcomes, options.limits, cpu_s), client


async def closed_loop(
    run_job: Run, load: Iterator[Job], concurrency: int, num_requests: int | None, duration_s: float | None
) -> list[Outcome]:
    """``concurrency`` clients until ``num_requests`` have been sent or ``duration_s`` is over, whichever is first."""
    outcomes: list[Outcome] = []
    started_at = time.monotonic()
    num_sent = 0

    async def one_client() -> None:
        nonlocal num_sent
        while (num_requests is None or num_sent < num_requests) and (
            duration_s is None or time.monotonic() - started_at < duration_s
        ):
            num_sent += 1
            outcomes.append(await run_job(next(load)))

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return outcomes


async def open_loop(
    run_job: Run, load: Iterator[Job], times: Iterator[float], num_requests: int | None, duration_s: float | None
) -> list[Outcome]:
    """Requests at ``times`` (seconds from now), whether or not earlier ones have ended."""
    started_at = time.monotonic()
    running: list[asyncio.Task[Outcome]] = []
    for at_s in times:
        if len(running) == num_requests or (duration_s is not None and at_s >= duration_s):
            break
        await asyncio.sleep(max(0.0, started_at + at_s - time.monotonic()))
        running.append(asyncio.create_task(run_job(next(load))))
    return await asyncio.gather(*running)


@contextlib.contextmanager
def _progress(options: LoadOptions) -> Iterator[Callable[[Outcome], None]]:
    """A progress bar on stderr, where that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task: TaskID = progress.add_task("requests", total=options.num_requests, note="")
        failed = 0

        def advance(outcome: Outcome) -> None:
            nonlocal failed
            failed += bool(outcome.failure)
            progress.update(task, advance=1, note=f"{failed} failed" if failed else "")

        yield advance


def _print(figures: Figures, options: LoadOptions) -> None:
    load = f"{options.rate:g} requests/s" if options.rate else f"{options.concurrency} at a time"
    table = Table(title=f"{figures.requests} requests in {figures.seconds:.1f} s, {load}", show_header=False)
    table.add_row("output tokens/s", f"{figures.output_tokens_per_s:.1f}")
    table.add_row("input tokens/s", f"{figures.input_tokens_per_s:.1f}")
    table.add_row("requests/s", f"{figures.requests_per_s:.2f}")
    table.add_row("goodput, requests/s", f"{figures.goodput_rps:.2f}")
    table.add_row("TTFT ms p50 p90 p99", _three(figures.ttft_ms))
    table.add_row("TPOT ms p50 p90 p99", _three(figures.tpot_ms))
    table.add_row("mean tokens in, out", f"{figures.mean_prompt_tokens} {figures.mean_output_tokens}")
    table.add_row("client's share of a core", f"{figures.client_cpu_share:.2f}")
    table.add_row("failed", str(figures.failed))
    for reason, count in figures.failures.items():
        table.add_row(f"  {count} times", reason)
    Console().print(table)


def _three(values: dict[str, float | None]) -> str:
    return "  ".join("-" if value is None else f"{value:.1f}" for value in values.values())


def _load_as_json(options: LoadOptions) -> dict[str, Any]:
    load = asdict(options)
    for secret_or_elsewhere in ("api_key", "model", "json_file"):
        del load[secret_or_elsewhere]
    return load

"""The ``paternoster simulate`` command: its options and what they mean. Called by ``tools.main``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from tools.options import JsonFile, MaxInflight, MaxQueue, option, switch, told, writable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.core.limits import Policy
    from tools.simulator.costs import Fitted
    from tools.simulator.sweep import MakeWorkload

Executors = Annotated[str, option("executors", "Executors; several numbers with commas between them are a sweep.")]
Policies = Annotated[str, option("policies", "Policies to compare, with commas; 'all' is all of them.")]
StepTokens = Annotated[str, option("max-step-tokens", "Most tokens in one step; 512. Several with commas are a sweep.")]
Rate = Annotated[float | None, option("rate", "Poisson arrivals: mean requests (or sessions) a second.", min=1e-6)]
Concurrency = Annotated[
    int | None, option("concurrency", "Closed loop: this many clients, each sends when its last answer ended.", min=1)
]
Burst = Annotated[str, option("burst", "Arrivals in bursts, as SIZE:SECONDS_BETWEEN.")]
TraceFile = Annotated[
    str,
    option(
        "trace", "CSV of arrivals: arrival,prompt_tokens,output_tokens[,prefix_group,prefix_tokens,tenant,priority]."
    ),
]
SessionTurns = Annotated[str, option("turns", "Conversations of so many turns: N, LOW:HIGH or exp:MEAN.")]
Think = Annotated[float, option("think", "Mean seconds between an answer and the next turn.", min=0)]
NumRequests = Annotated[int, option("num-requests", "Requests, or conversations.", min=1)]
PromptTokens = Annotated[str, option("prompt-tokens", "Prompt lengths: N, LOW:HIGH, exp:MEAN or exp:MEAN:MOST.")]
OutputTokens = Annotated[str, option("output-tokens", "Output lengths, in the same forms.")]
MaxTokens = Annotated[
    int | None, option("max-tokens", "What every request asks for; it stops by itself. Its output length unless given.")
]
Kv = Annotated[
    Literal["paged", "reserve"], option("kv", "'reserve' holds each request's longest output from the start.")
]
PrefixCache = Annotated[bool, switch("prefix-cache", "Share equal beginnings of prompts.")]
BlockSize = Annotated[int | None, option("block-size", "Tokens in one KV block; 16.", min=1, max=256)]
NumBlocks = Annotated[int | None, option("num-blocks", "KV blocks of one executor; 4096.", min=1)]
MaxLanes = Annotated[int | None, option("max-lanes", "Most requests that run at once on one executor; 64.", min=1)]
MaxModelLen = Annotated[int | None, option("max-model-len", "Longest prompt plus output; 8192.", min=2)]
BudgetMs = Annotated[int, option("step-time-budget-ms", "Predicted time that prefills may make a step take.", min=1)]
StaticBatch = Annotated[int | None, option("static-batch-size", "Policy static: its batch; all lanes unless given.")]
StaticWait = Annotated[int, option("static-wait-ms", "Policy static: how long a batch waits to fill.", min=0)]
BaseMs = Annotated[float, option("base-ms", "Cost of a step.", min=0)]
RowMs = Annotated[float, option("row-ms", "Cost of each token computed.", min=0)]
ReadNs = Annotated[float, option("read-ns", "Cost of each token of context that a computed one reads.", min=0)]
OverheadMs = Annotated[float, option("overhead-ms", "From one step's end to the next one's start.", min=0)]
LinkMs = Annotated[float, option("link-ms", "One way between scheduler and executor.", min=0)]
ClientMs = Annotated[
    float | None, option("client-ms", "From the scheduler to a client and back: HTTP and text. 0 unless fitted.", min=0)
]
Fit = Annotated[
    str,
    option("fit", "Journal to take costs and the executor's size from, where the options for them are not given."),
]
TtftGoal = Annotated[float | None, option("ttft-limit-ms", "Goodput: longest time to the first token.", min=0)]
TpotGoal = Annotated[float | None, option("tpot-limit-ms", "Goodput: longest mean gap between tokens.", min=0)]
Find = Annotated[bool, switch("find", "Find the fewest executors with which enough requests meet their limits.")]
Attain = Annotated[float, option("attain", "How many are enough, from 0 to 1.", min=0, max=1)]
LoadSeed = Annotated[int, option("seed", "The same seed gives the same load.")]
Picture = Annotated[
    str,
    option("picture", "HTML file for the picture: lanes by steps or, of a sweep, what it trades.", callback=writable),
]
Steps = Annotated[int, option("steps", "Steps in the picture.", min=1)]


def simulate(
    executors: Executors = "1",
    policies: Policies = "",
    rate: Rate = None,
    concurrency: Concurrency = None,
    burst: Burst = "",
    trace: TraceFile = "",
    turns: SessionTurns = "",
    think: Think = 10,
    num_requests: NumRequests = 1000,
    prompt_tokens: PromptTokens = "exp:256",
    output_tokens: OutputTokens = "exp:128",
    max_tokens: MaxTokens = None,
    seed: LoadSeed = 0,
    kv: Kv = "paged",
    prefix_cache: PrefixCache = True,
    block_size: BlockSize = None,
    num_blocks: NumBlocks = None,
    max_lanes: MaxLanes = None,
    max_step_tokens: StepTokens = "",
    max_model_len: MaxModelLen = None,
    max_inflight: MaxInflight = 2,
    max_queue: MaxQueue = None,
    step_time_budget_ms: BudgetMs = 100,
    static_batch_size: StaticBatch = None,
    static_wait_ms: StaticWait = 100,
    base_ms: BaseMs = 14,
    row_ms: RowMs = 0.6,
    read_ns: ReadNs = 100,
    overhead_ms: OverheadMs = 0.5,
    link_ms: LinkMs = 0.2,
    client_ms: ClientMs = None,
    fit: Fit = "",
    ttft_limit_ms: TtftGoal = None,
    tpot_limit_ms: TpotGoal = None,
    find: Find = False,
    attain: Attain = 0.99,
    picture: Picture = "",
    steps: Steps = 200,
    json: JsonFile = "",
) -> None:
    """Run the real scheduler in virtual time, without a model.

    Everybody comes at once unless --rate, --concurrency, --burst or --trace says otherwise.
    """
    from dataclasses import replace

    from services.scheduler.core.limits import Settings
    from tools.bench.figures import Limits
    from tools.simulator import report, sweep
    from tools.simulator.engine import Model

    fitted = _fitted(fit, base_ms, row_ms, read_ns, overhead_ms, link_ms)
    costs, size = fitted.costs, fitted.limits
    if client_ms is not None:
        costs = replace(costs, client_us=client_ms * 1000)
    if fit:
        print(f"fitted: {costs.tell()}")
    context_len, num_lanes = max_model_len or fitted.context_len, max_lanes or size.num_lanes
    budgets = _numbers(max_step_tokens or str(size.max_step_tokens), "--max-step-tokens")
    settings = Settings(
        max_inflight=max_inflight,
        max_queue=max_queue,
        step_time_budget_ms=step_time_budget_ms,
        static_batch_size=static_batch_size or num_lanes,
        static_wait_ms=static_wait_ms,
        prefix_cache=prefix_cache,
        kv_reserve=kv == "reserve",
    )
    model = Model(
        settings=settings,
        executors=_numbers(executors, "--executors")[0],
        limits=sweep.fleet_of(num_blocks or size.num_blocks, block_size or size.block_size, num_lanes, budgets[0]),
        context_len=context_len,
        costs=costs,
        max_tokens=max_tokens,
        goals=Limits(ttft_limit_ms, tpot_limit_ms),
    )
    comers = Comers(rate, concurrency, costs.client_us, burst, trace)
    load = _workload(comers, turns, think, num_requests, prompt_tokens, output_tokens, seed, context_len)
    shown = report.Shown(json, picture, steps)
    if policies:
        raise typer.Exit(report.policies(model, load, _policies(policies), shown))
    if find:
        raise typer.Exit(report.find(model, load, attain, shown))
    counts = _numbers(executors, "--executors")
    raise typer.Exit(report.rows(model, load, counts, budgets, shown))


def _numbers(text: str, name: str) -> list[int]:
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(numbers):
        raise typer.BadParameter(f"{text!r} is not one or more whole numbers with commas between them", param_hint=name)
    return numbers


def _policies(text: str) -> "list[Policy]":
    from typing import get_args

    from services.scheduler.core.limits import Policy

    known = list(get_args(Policy))
    chosen = known if text == "all" else [part.strip() for part in text.split(",")]
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint="--policies")
    return [policy for name in chosen for policy in known if policy == name]


def _fitted(fit: str, base_ms: float, row_ms: float, read_ns: float, overhead_ms: float, link_ms: float) -> "Fitted":
    from services.scheduler.core.snapshot import SnapshotError
    from services.scheduler.journal_format import JournalError
    from tools.replay import Divergence
    from tools.simulator import costs, sweep

    if not fit:
        line = costs.Costs.line(base_ms * 1000, row_ms * 1000, read_ns / 1000, overhead_ms * 1000, link_ms * 1000)
        return costs.Fitted(line, sweep.fleet_of(4096, 16, 64, 512), 8192)
    try:
        return costs.fit(Path(fit), link_ms * 1000)
    except (OSError, JournalError, SnapshotError, Divergence, costs.FitError) as error:
        raise typer.BadParameter(told(error), param_hint="--fit") from error


class Comers(NamedTuple):
    """When requests come: at most one of the ways; everybody at once if none."""

    rate: float | None
    concurrency: int | None
    client_us: float
    burst: str
    trace: str


def _workload(
    comers: Comers,
    turns: str,
    think: float,
    num_requests: int,
    prompt_tokens: str,
    output_tokens: str,
    seed: int,
    context_len: int,
) -> "MakeWorkload":
    from tools.bench.command import lengths
    from tools.bench.workload import arrivals
    from tools.simulator import workload as w

    rate, concurrency, client_us, burst, trace = comers
    if sum(map(bool, (rate, concurrency, burst, trace))) > 1:
        raise typer.BadParameter("only one of --rate, --concurrency, --burst and --trace says when requests come")
    if concurrency and turns:
        raise typer.BadParameter("conversations come with --rate, --burst or all at once", param_hint="--turns")
    if trace:
        try:
            read = w.Trace(Path(trace), None)
        except (OSError, w.TraceError) as error:
            raise typer.BadParameter(told(error), param_hint="--trace") from error
        return lambda: read
    prompts, outputs = lengths(prompt_tokens, "--prompt-tokens"), lengths(output_tokens, "--output-tokens")
    if concurrency:
        clients, turn_us = concurrency, round(client_us)
        return lambda: w.Closed(clients, turn_us, prompts, outputs, seed, num_requests)
    size, every_s = _burst(burst) if burst else (1, 0.0)

    def times() -> "Iterator[float]":
        if rate:
            return arrivals(seed, rate)
        return w.bursts(size, every_s) if burst else w.at_once()

    if turns:
        of_session = lengths(turns, "--turns")
        return lambda: w.Sessions(times(), num_requests, of_session, think, prompts, outputs, seed, context_len)
    return lambda: w.Independent(times(), prompts, outputs, seed, num_requests)


def _burst(text: str) -> tuple[int, float]:
    size, _, every = text.partition(":")
    try:
        if int(size) > 0 and float(every) > 0:
            return int(size), float(every)
    except ValueError:
        pass
    raise typer.BadParameter(f"{text!r} is not SIZE:SECONDS, such as 32:5", param_hint="--burst")

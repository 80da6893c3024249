"""The ``paternoster bench`` commands and their options; a command imports its test only when it runs.

Called by ``tools.main``. Imports typer only.
"""

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tools.options import (
    BackendOption,
    DtypeOption,
    JsonFile,
    MaxInflight,
    Model,
    QuantizationOption,
    Threads,
    option,
    switch,
    writable,
)
from tools.waiting_threads import choose_wait

if TYPE_CHECKING:
    from tools.bench.workload import Lengths

app = typer.Typer(no_args_is_help=True, help="Measure a server.")

BenchUrl = Annotated[str, option("url", "Any OpenAI-compatible server.")]
BenchModel = Annotated[str, option("model", "Name of the model; the first one offered unless given.")]
BenchKey = Annotated[str, option("api-key", "Key to send.")]
Api = Annotated[Literal["completions", "chat"], option("api", "Which of the two APIs to ask.")]
Concurrency = Annotated[int, option("concurrency", "Closed loop: this many clients, one request each.", min=1)]
Rate = Annotated[
    float | None, option("rate", "Open loop instead: mean requests a second, as a Poisson process.", min=1e-6)
]
PromptTokens = Annotated[str, option("prompt-tokens", "Prompt lengths: N, LOW:HIGH, exp:MEAN or exp:MEAN:MOST.")]
OutputTokens = Annotated[str, option("output-tokens", "Output lengths, in the same forms.")]
NumRequests = Annotated[
    int | None, option("num-requests", "Stop after this many; 100 unless a duration is given.", min=1)
]
Duration = Annotated[float | None, option("duration", "Stop sending after this many seconds.", min=0.1)]
Warmup = Annotated[int, option("warmup", "Requests sent first and not measured.", min=0)]
LoadSeed = Annotated[int, option("seed", "The same seed gives the same load.")]
IgnoreEos = Annotated[bool, switch("ignore-eos", "Ask for outputs of exactly the drawn length, where the server can.")]
Temperature = Annotated[float, option("temperature", "Sampling temperature; 0 is greedy.", min=0)]
RequestTimeout = Annotated[float, option("timeout", "Seconds after which a request counts as failed.", min=0.1)]
TtftLimit = Annotated[float | None, option("ttft-limit-ms", "Goodput: longest time to the first text.", min=0)]
TpotLimit = Annotated[float | None, option("tpot-limit-ms", "Goodput: longest mean gap between tokens.", min=0)]
Running = Annotated[str, option("running", "Running requests, several numbers with commas between them.")]
Queue = Annotated[int, option("queue", "Requests that wait meanwhile.", min=0)]
CachedBlocks = Annotated[int, option("cached-blocks", "Blocks in the prefix cache meanwhile.", min=0)]
Policies = Annotated[str, option("policies", "Policies to compare, with commas.")]
ServedModel = Annotated[str, option("model", "Model to serve, as for 'up'.")]
CompareLanes = Annotated[int, option("max-lanes", "Lanes of the executor, and the batch of the policy static.", min=1)]
CompareRequests = Annotated[int, option("num-requests", "Requests, all sent at once.", min=1)]
StartTimeout = Annotated[float, option("start-timeout", "Seconds a system may take to start.", min=1)]
Picture = Annotated[str, option("picture", "HTML file for the picture of lanes by steps.", callback=writable)]
PictureSteps = Annotated[int, option("steps", "Steps in the picture.", min=1)]
Ticks = Annotated[int, option("ticks", "Ticks to measure, each.", min=10)]
NumStreams = Annotated[str, option("streams", "Streams at once, several numbers with commas between them.")]
Seconds = Annotated[float, option("seconds", "How long to measure, twice each.", min=0.5)]
StepMs = Annotated[float, option("step-ms", "Milliseconds of a step of the fake backend.", min=0)]


Decodes = Annotated[str, option("decodes", "Running streams, several numbers with commas between them.")]
PrefillTokens = Annotated[int, option("prefill-tokens", "Tokens of one prefill chunk in the same step.", min=0)]
PrefillCached = Annotated[int, option("prefill-cached", "Tokens already computed in front of the chunk.", min=0)]
Context = Annotated[int, option("context", "Tokens of context of each stream.", min=1)]
StepTemperature = Annotated[float, option("temperature", "0 is greedy; above it rows are drawn, top_p 0.95.", min=0)]
Repeats = Annotated[int, option("repeats", "Turns of the measurement; figures are medians.", min=3)]


@app.command("serve")
def serve(
    url: BenchUrl = "http://127.0.0.1:8000",
    model: BenchModel = "",
    api_key: BenchKey = "",
    api: Api = "completions",
    concurrency: Concurrency = 8,
    rate: Rate = None,
    prompt_tokens: PromptTokens = "170",
    output_tokens: OutputTokens = "16:128",
    num_requests: NumRequests = None,
    duration: Duration = None,
    warmup: Warmup = 4,
    seed: LoadSeed = 0,
    ignore_eos: IgnoreEos = True,
    temperature: Temperature = 0,
    timeout: RequestTimeout = 600,
    ttft_limit_ms: TtftLimit = None,
    tpot_limit_ms: TpotLimit = None,
    json: JsonFile = "",
) -> None:
    """Put a load on a server and measure what it gives."""
    from tools.bench.figures import Limits
    from tools.bench.serve import LoadOptions, run

    options = LoadOptions(
        url=url,
        model=model,
        api_key=api_key,
        chat=api == "chat",
        concurrency=concurrency,
        rate=rate,
        prompt_tokens=lengths(prompt_tokens, "--prompt-tokens"),
        output_tokens=lengths(output_tokens, "--output-tokens"),
        num_requests=100 if num_requests is None and duration is None else num_requests,
        duration_s=duration,
        warmup=warmup,
        seed=seed,
        ignore_eos=ignore_eos,
        temperature=temperature,
        timeout_s=timeout,
        limits=Limits(ttft_limit_ms, tpot_limit_ms),
        json_file=json,
    )
    raise typer.Exit(run(options))


@app.command("scheduler")
def scheduler(
    running: Running = "64,256,1024,4096",
    queue: Queue = 10_000,
    cached_blocks: CachedBlocks = 100_000,
    ticks: Ticks = 300,
    json: JsonFile = "",
) -> None:
    """Measure the CPU time of a tick, by the number of requests."""
    from tools.bench.scheduler import run

    numbers = _numbers(running, "--running")
    if not all(numbers):
        raise typer.BadParameter("at least one request must run", param_hint="--running")
    raise typer.Exit(run(numbers, queue, cached_blocks, ticks, json))


@app.command("gateway")
def gateway(
    streams: NumStreams = "1,64,256",
    seconds: Seconds = 10,
    step_ms: StepMs = 20,
    json: JsonFile = "",
) -> None:
    """Measure the CPU time of a streamed token and of a request."""
    from tools.bench.gateway import run

    numbers = _numbers(streams, "--streams")
    if not all(numbers):
        raise typer.BadParameter("at least one stream must run", param_hint="--streams")
    raise typer.Exit(run(numbers, seconds, step_ms, json))


@app.command("step")
def step(
    model: Model = "default",
    decodes: Decodes = "1,32",
    prefill_tokens: PrefillTokens = 0,
    prefill_cached: PrefillCached = 0,
    context: Context = 256,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "none",
    threads: Threads = None,
    temperature: StepTemperature = 0,
    repeats: Repeats = 15,
    json: JsonFile = "",
) -> None:
    """Measure a step on this CPU.

    Beside its floor: the products alone, and the bytes of KV.
    """
    choose_wait()
    from tools import model as models
    from tools.bench.step import StepOptions, run

    options = StepOptions(
        model=models.cached(model, lambda line: print(line, file=sys.stderr)),
        decodes=_numbers(decodes, "--decodes"),
        prefill_tokens=prefill_tokens,
        prefill_cached=prefill_cached,
        context=context,
        dtype=dtype,
        quantization=quantization,
        threads=threads,
        temperature=temperature,
        repeats=repeats,
        json_file=json,
    )
    if not prefill_tokens and not all(options.decodes):
        raise typer.BadParameter(
            "a step without decodes and without a prefill computes nothing", param_hint="--decodes"
        )
    raise typer.Exit(run(options))


@app.command("kernels")
def kernels(
    model: Model = "default",
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "none",
    threads: Threads = None,
    repeats: Repeats = 15,
    json: JsonFile = "",
) -> None:
    """Measure each kernel on this CPU with the model's shapes.

    By its matrix rate, or its share of the memory's speed.
    """
    choose_wait()
    from tools import model as models
    from tools.bench.kernels import run

    folder = models.cached(model, lambda line: print(line, file=sys.stderr))
    raise typer.Exit(run(folder, dtype, quantization, threads, repeats, json))


def _numbers(text: str, name: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not whole numbers with commas between them", param_hint=name)
    return tuple(map(int, parts))


@app.command("compare")
def compare(
    policies: Policies = "static,prefill-first,continuous",
    backend: BackendOption = "torch",
    model: ServedModel = "default",
    max_lanes: CompareLanes = 8,
    max_inflight: MaxInflight = 2,
    num_requests: CompareRequests = 64,
    prompt_tokens: PromptTokens = "exp:64:256",
    output_tokens: OutputTokens = "exp:64:256",
    seed: LoadSeed = 0,
    start_timeout: StartTimeout = 300,
    picture: Picture = "",
    steps: PictureSteps = 400,
    json: JsonFile = "",
) -> None:
    """Draw the lanes of whole systems, one under each policy.

    Each is started, and everybody comes at once.
    """
    from typing import get_args

    from services.scheduler.core.limits import Policy
    from tools.bench.compare import CompareOptions, run

    names = [name.strip() for name in policies.split(",")]
    for name in names:
        if name not in get_args(Policy):
            raise typer.BadParameter(f"{name!r} is none of {', '.join(get_args(Policy))}", param_hint="--policies")
    options = CompareOptions(
        policies=names,
        backend=backend,
        model=model,
        max_lanes=max_lanes,
        max_inflight=max_inflight,
        num_requests=num_requests,
        prompt_tokens=lengths(prompt_tokens, "--prompt-tokens"),
        output_tokens=lengths(output_tokens, "--output-tokens"),
        seed=seed,
        start_timeout_s=start_timeout,
        picture=picture,
        steps=steps,
        json_file=json,
    )
    raise typer.Exit(run(options))


def lengths(text: str, name: str) -> "Lengths":
    from tools.bench.workload import Lengths

    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=name) from error

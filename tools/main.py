"""The ``paternoster`` command: turns options and environment variables into the options of one process and runs it.

Each command imports its own service only when it runs, so that an image needs the packages of its service alone.
"""

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from tools import environment
from tools import options as o
from tools.bench import command as bench
from tools.keys import api_keys, check_certificate, peer_keys, scheduler_keys
from tools.simulator.command import simulate
from tools.waiting_threads import choose_wait

PROGRAM = "paternoster"
USAGE_ERROR = 2

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Serve language models.\n\nAn option --max-lanes is also the variable PATERNOSTER_MAX_LANES.",
)
model_app = typer.Typer(no_args_is_help=True, help="Prepare a model for serving.")
app.add_typer(model_app, name="model")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point: runs one command; what the user got wrong is one line on stderr and exit code 2."""
    command = typer.main.get_command(app)
    if lines := environment.complaints(os.environ, environment.known_variables(command)):
        _complain(lines)
        sys.exit(USAGE_ERROR)
    try:
        code = command.main(prog_name=PROGRAM, standalone_mode=False)
    except TyperException as error:
        message = error.format_message()
        if message.startswith("Usage:"):  # no command was named: this is the help
            print(message, file=sys.stderr)
        elif message:
            _complain([" ".join(message.split()).replace("Value error, ", "")])
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(130)
    sys.exit(code or 0)


def _complain(lines: list[str]) -> None:
    for line in lines:
        print(f"{PROGRAM}: error: {line}", file=sys.stderr)


def _finish(code: int) -> None:
    raise typer.Exit(code)


def _tenant_weights(given: list[str] | None) -> dict[str, float]:
    """Weights by tenant; the last one given for a tenant counts."""
    weights: dict[str, float] = {}
    for one in given or ():
        name, _, weight = one.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = 0.0
        if not name or not 0 < weights[name] < float("inf"):
            raise typer.BadParameter(f"{one!r} is not NAME=WEIGHT with a positive weight", param_hint="--tenant-weight")
    return weights


def _absolute(path: str) -> str:
    """For a process that may run in another folder; nothing stays nothing."""
    return str(Path(path).absolute()) if path else ""


def _served_name(given: str, model: str, backend: str) -> str:
    if given:
        return given
    return "fake" if backend == "fake" else Path(model).name


def _model_folder(model: str, backend: str) -> str:
    if backend == "torch" and not (Path(model) / "config.json").is_file():
        what = f"{model!r} is not a model folder;" if model else "a model folder is needed;"
        raise typer.BadParameter(
            f"{what} 'paternoster model fetch REF DIR' fills one",
            param_hint="--model",
        )
    return model


@app.command()
def up(
    host: o.Host = "127.0.0.1",
    port: o.Port = 8000,
    gateways: o.Gateways = 1,
    executors: o.Executors = 1,
    model: o.Model = "default",
    served_model_name: o.ServedModelName = "",
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    quantization: o.QuantizationOption = "none",
    backend: o.BackendOption = "torch",
    policy: o.PolicyOption = "continuous",
    static_batch_size: o.StaticBatchSize = 8,
    static_wait_ms: o.StaticWaitMs = 100,
    max_inflight: o.MaxInflight = 2,
    block_size: o.BlockSize = 16,
    num_blocks: o.NumBlocks = None,
    kv_memory: o.KvMemory = None,
    max_lanes: o.MaxLanes = 64,
    max_step_tokens: o.MaxStepTokens = 512,
    max_model_len: o.MaxModelLen = None,
    max_queue: o.MaxQueue = None,
    max_queue_tokens: o.MaxQueueTokens = None,
    ttft_limit_ms: o.TtftLimitMs = None,
    ageing_ms: o.AgeingMs = 10_000,
    tenant_weight: o.TenantWeights = None,
    prefix_cache: o.PrefixCache = "on",
    api_key: o.ApiKeys = None,
    api_key_file: o.ApiKeyFile = "",
    cors_origin: o.CorsOrigins = None,
    ssl_certfile: o.SslCertfile = "",
    ssl_keyfile: o.SslKeyfile = "",
    ssl_keyfile_password: o.SslKeyfilePassword = "",
    tool_call_parser: o.ToolCallParserOption = "auto",
    reasoning_parser: o.ReasoningParserOption = "auto",
    trust_request_chat_template: o.TrustRequestChatTemplate = False,
    debug_endpoints: o.DebugEndpoints = False,
    log_level: o.LogLevelOption = "info",
    log_format: o.LogFormatOption = "text",
    otlp_endpoint: o.OtlpEndpoint = "",
    drain_timeout: o.DrainTimeout = 30,
    recovery_timeout: o.RecoveryTimeout = 60,
    step_timeout: o.StepTimeout = 60,
    journal: o.Journal = "",
    journal_redact: o.JournalRedact = False,
    seed: o.Seed = None,
    threads: o.Threads = None,
    link_port: o.LinkPort = 5701,
    metrics_port: o.UpMetricsPort = 9101,
) -> None:
    """Start a whole system on this machine and keep it running."""
    from tools.processes import UpOptions
    from tools.up import run

    api_keys(api_key, api_key_file)  # a mistake in them is told now; the gateways read them
    check_certificate(ssl_certfile, ssl_keyfile, ssl_keyfile_password)
    options = UpOptions(
        host=host,
        port=port,
        gateways=gateways,
        executors=executors,
        model=model,
        served_model_name=served_model_name,
        device=device,
        dtype=dtype,
        quantization=quantization,
        backend=backend,
        policy=policy,
        static_batch_size=static_batch_size,
        static_wait_ms=static_wait_ms,
        max_inflight=max_inflight,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_memory=kv_memory,
        max_lanes=max_lanes,
        max_step_tokens=max_step_tokens,
        max_model_len=max_model_len,
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        ttft_limit_ms=ttft_limit_ms,
        ageing_ms=ageing_ms,
        tenant_weights=_tenant_weights(tenant_weight),
        prefix_cache=prefix_cache,
        api_keys=tuple(api_key or ()),
        api_key_file=_absolute(api_key_file),
        cors_origins=tuple(cors_origin or ()),
        ssl_certfile=_absolute(ssl_certfile),
        ssl_keyfile=_absolute(ssl_keyfile),
        ssl_keyfile_password=ssl_keyfile_password,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        trust_request_chat_template=trust_request_chat_template,
        debug_endpoints=debug_endpoints,
        log_level=log_level,
        log_format=log_format,
        otlp_endpoint=otlp_endpoint,
        drain_timeout_s=drain_timeout,
        recovery_timeout_s=recovery_timeout,
        step_timeout_s=step_timeout,
        journal=journal,
        journal_redact=journal_redact,
        seed=seed,
        threads=threads,
        link_port=link_port,
        metrics_port=metrics_port or None,
    )
    _finish(run(options))


@app.command()
def gateway(
    name: o.Name = "",
    scheduler: o.GatewayScheduler = "tcp://127.0.0.1:5701",
    model: o.ModelFolder = "",
    curve_secret_file: o.CurveSecretFile = "",
    curve_scheduler_file: o.CurveSchedulerFile = "",
    backend: o.BackendOption = "torch",
    served_model_name: o.ServedModelName = "",
    host: o.Host = "127.0.0.1",
    port: o.Port = 8000,
    fd: o.ListenFd = None,
    metrics_host: o.GatewayMetricsHost = "127.0.0.1",
    metrics_port: o.MetricsPort = 9201,
    api_key: o.ApiKeys = None,
    api_key_file: o.ApiKeyFile = "",
    cors_origin: o.CorsOrigins = None,
    ssl_certfile: o.SslCertfile = "",
    ssl_keyfile: o.SslKeyfile = "",
    ssl_keyfile_password: o.SslKeyfilePassword = "",
    tool_call_parser: o.ToolCallParserOption = "auto",
    reasoning_parser: o.ReasoningParserOption = "auto",
    trust_request_chat_template: o.TrustRequestChatTemplate = False,
    debug_endpoints: o.DebugEndpoints = False,
    log_level: o.LogLevelOption = "info",
    log_format: o.LogFormatOption = "text",
    otlp_endpoint: o.OtlpEndpoint = "",
    drain_timeout: o.DrainTimeout = 30,
    recovery_timeout: o.RecoveryTimeout = 60,
    seed: o.Seed = None,
) -> None:
    """Run one gateway: HTTP on one side, the scheduler on the other."""
    from services.gateway.main import run
    from services.gateway.options import GatewayOptions

    options = GatewayOptions(
        name=name or socket.gethostname(),
        scheduler=scheduler,
        keys=peer_keys(curve_secret_file, curve_scheduler_file),
        model=_model_folder(model, backend),
        backend=backend,
        served_model_name=_served_name(served_model_name, model, backend),
        host=host,
        port=port,
        fd=fd,
        metrics_host=metrics_host,
        metrics_port=metrics_port or None,
        api_keys=api_keys(api_key, api_key_file),
        cors_origins=tuple(cors_origin or ()),
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        ssl_keyfile_password=ssl_keyfile_password,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        trust_request_chat_template=trust_request_chat_template,
        debug_endpoints=debug_endpoints,
        log_level=log_level,
        log_format=log_format,
        otlp_endpoint=otlp_endpoint,
        drain_timeout_s=drain_timeout,
        recovery_timeout_s=recovery_timeout,
        seed=seed,
    )
    _finish(run(options))


@app.command()
def scheduler(
    gateways_endpoint: o.GatewaysEndpoint = "tcp://127.0.0.1:5701",
    executors_endpoint: o.ExecutorsEndpoint = "tcp://127.0.0.1:5702",
    curve_secret_file: o.CurveSecretFile = "",
    curve_clients: o.CurveClients = "",
    policy: o.PolicyOption = "continuous",
    static_batch_size: o.StaticBatchSize = 8,
    static_wait_ms: o.StaticWaitMs = 100,
    max_inflight: o.MaxInflight = 2,
    max_step_tokens: o.StepTokensCap = None,
    max_queue: o.MaxQueue = None,
    max_queue_tokens: o.MaxQueueTokens = None,
    ttft_limit_ms: o.TtftLimitMs = None,
    ageing_ms: o.AgeingMs = 10_000,
    tenant_weight: o.TenantWeights = None,
    prefix_cache: o.PrefixCache = "on",
    recovery_timeout: o.RecoveryTimeout = 60,
    step_timeout: o.StepTimeout = 60,
    journal: o.Journal = "",
    journal_redact: o.JournalRedact = False,
    host: o.MetricsHost = "127.0.0.1",
    metrics_port: o.MetricsPort = 9101,
    log_level: o.LogLevelOption = "info",
    log_format: o.LogFormatOption = "text",
    otlp_endpoint: o.OtlpEndpoint = "",
) -> None:
    """Run the scheduler, the one process that plans every step."""
    from services.scheduler.main import run
    from services.scheduler.options import SchedulerOptions

    options = SchedulerOptions(
        gateways_endpoint=gateways_endpoint,
        executors_endpoint=executors_endpoint,
        keys=scheduler_keys(curve_secret_file, curve_clients),
        policy=policy,
        static_batch_size=static_batch_size,
        static_wait_ms=static_wait_ms,
        max_inflight=max_inflight,
        max_step_tokens=max_step_tokens,
        max_queue=max_queue,
        max_queue_tokens=max_queue_tokens,
        ttft_limit_ms=ttft_limit_ms,
        ageing_ms=ageing_ms,
        tenant_weights=_tenant_weights(tenant_weight),
        prefix_cache=prefix_cache == "on",
        recovery_timeout_s=recovery_timeout,
        step_timeout_s=step_timeout,
        journal=journal,
        journal_redact=journal_redact,
        host=host,
        metrics_port=metrics_port or None,
        log_level=log_level,
        log_format=log_format,
        otlp_endpoint=otlp_endpoint,
    )
    _finish(run(options))


@app.command()
def executor(
    name: o.Name = "",
    scheduler: o.ExecutorScheduler = "tcp://127.0.0.1:5702",
    model: o.ModelFolder = "",
    curve_secret_file: o.CurveSecretFile = "",
    curve_scheduler_file: o.CurveSchedulerFile = "",
    backend: o.BackendOption = "torch",
    device: o.DeviceOption = "auto",
    dtype: o.DtypeOption = "auto",
    quantization: o.QuantizationOption = "none",
    block_size: o.BlockSize = 16,
    num_blocks: o.NumBlocks = None,
    kv_memory: o.KvMemory = None,
    max_lanes: o.MaxLanes = 64,
    max_step_tokens: o.MaxStepTokens = 512,
    max_model_len: o.MaxModelLen = None,
    threads: o.Threads = None,
    drain_timeout: o.DrainTimeout = 4,
    step_timeout: o.StepTimeout = 60,
    host: o.MetricsHost = "127.0.0.1",
    metrics_port: o.MetricsPort = 9102,
    log_level: o.LogLevelOption = "info",
    log_format: o.LogFormatOption = "text",
    otlp_endpoint: o.OtlpEndpoint = "",
) -> None:
    """Run one executor: the model and its KV cache."""
    choose_wait()
    from services.executor.main import run
    from services.executor.options import ExecutorOptions

    options = ExecutorOptions(
        name=name or socket.gethostname(),
        scheduler=scheduler,
        keys=peer_keys(curve_secret_file, curve_scheduler_file),
        model=_model_folder(model, backend),
        backend=backend,
        device=device,
        dtype=dtype,
        quantization=quantization,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_memory=kv_memory,
        max_lanes=max_lanes,
        max_step_tokens=max_step_tokens,
        max_model_len=max_model_len,
        threads=threads,
        host=host,
        metrics_port=metrics_port or None,
        log_level=log_level,
        log_format=log_format,
        otlp_endpoint=otlp_endpoint,
        drain_timeout_s=drain_timeout,
        step_timeout_s=step_timeout,
    )
    _finish(run(options))


@app.command()
def keys(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Folder to fill.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Who gets a pair; 'client' unless given.")
    ] = None,
) -> None:
    """Make keys for links between hosts. Those that exist are kept."""
    from shared.net.curve import make_keys

    try:
        made = make_keys(Path(directory), names or ["client"])
    except OSError as error:
        raise TyperException(f"cannot write keys: {error}") from error
    for path in made:
        print(path)


@app.command()
def replay(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A journal that 'up --journal' or 'scheduler --journal' has written.")
    ],
    request: Annotated[str, o.option("request", "Id of an answer whose story to tell.")] = "",
    picture: bench.Picture = "",
    steps: Annotated[int, o.option("steps", "Steps of each executor in the picture.", min=1)] = 400,
) -> None:
    """Run a journal again and check that the same is decided."""
    from tools.replay import ReplayOptions, main

    _finish(main(ReplayOptions(Path(file), request, picture, steps)))


app.command()(simulate)


@model_app.command("fetch")
def fetch(
    ref: Annotated[str, typer.Argument(metavar="REF", help="'default', a hub id, a local folder or a .gguf file.")],
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="Folder to fill; the user's cache folder unless given.")
    ] = "",
) -> None:
    """Fetch and convert a model; print the folder to serve it from."""
    from tools import model

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # leaves no half-made folder behind

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        folder = model.fetch(ref, Path(directory), report) if directory else model.cached(ref, report)
    except (OSError, ValueError) as error:
        raise TyperException(f"cannot fetch {ref}: {error}") from error
    print(folder)


if __name__ == "__main__":
    main()

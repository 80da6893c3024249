"""The commands of the services: options become those of one process, which then runs.

Each imports its own service only when it runs, so that an image needs the packages of its service alone.
"""

import socket
from dataclasses import dataclass
from pathlib import Path

import typer

from tools import options as o
from tools.command import takes
from tools.keys import api_keys, peer_keys, scheduler_keys
from tools.option_groups import Access, Compute, Http, Journal, Logging, Queue, Size, Steps
from tools.waiting_threads import choose_wait


@dataclass(frozen=True, kw_only=True)
class GatewayCommand:
    """Options of ``paternoster gateway``."""

    name: o.Name = ""
    scheduler: o.GatewayScheduler = "tcp://127.0.0.1:5701"
    model: o.ModelFolder = ""
    curve_secret_file: o.CurveSecretFile = ""
    curve_scheduler_file: o.CurveSchedulerFile = ""
    backend: o.BackendOption = "torch"
    served_model_name: o.ServedModelName = ""
    host: o.Host = "127.0.0.1"
    port: o.Port = 8000
    fd: o.ListenFd = None
    metrics_host: o.GatewayMetricsHost = "127.0.0.1"
    metrics_port: o.MetricsPort = 9201
    access: Access
    http: Http
    logging: Logging
    drain_timeout: o.DrainTimeout = 30
    recovery_timeout: o.RecoveryTimeout = 60
    seed: o.Seed = None


@takes(GatewayCommand)
def gateway(given: GatewayCommand) -> int:
    """Run one gateway: HTTP on one side, the scheduler on the other."""
    from services.gateway.main import run
    from services.gateway.options import GatewayOptions

    options = GatewayOptions(
        name=given.name or socket.gethostname(),
        scheduler=given.scheduler,
        keys=peer_keys(given.curve_secret_file, given.curve_scheduler_file),
        model=_model_folder(given.model, given.backend),
        backend=given.backend,
        served_model_name=_served_name(given),
        host=given.host,
        port=given.port,
        fd=given.fd,
        metrics_host=given.metrics_host,
        metrics_port=given.metrics_port or None,
        api_keys=api_keys(given.access.api_key, given.access.api_key_file),
        cors_origins=tuple(given.access.cors_origin or ()),
        drain_timeout_s=given.drain_timeout,
        recovery_timeout_s=given.recovery_timeout,
        seed=given.seed,
        **vars(given.http),
        **vars(given.logging),
    )
    return run(options)


@dataclass(frozen=True, kw_only=True)
class SchedulerCommand:
    """Options of ``paternoster scheduler``."""

    gateways_endpoint: o.GatewaysEndpoint = "tcp://127.0.0.1:5701"
    executors_endpoint: o.ExecutorsEndpoint = "tcp://127.0.0.1:5702"
    curve_secret_file: o.CurveSecretFile = ""
    curve_clients: o.CurveClients = ""
    steps: Steps
    max_step_tokens: o.StepTokensCap = None
    queue: Queue
    recovery_timeout: o.RecoveryTimeout = 60
    step_timeout: o.StepTimeout = 60
    journal: Journal
    host: o.MetricsHost = "127.0.0.1"
    metrics_port: o.MetricsPort = 9101
    logging: Logging


@takes(SchedulerCommand)
def scheduler(given: SchedulerCommand) -> int:
    """Run the scheduler, the one process that plans every step."""
    from services.scheduler.main import run
    from services.scheduler.options import SchedulerOptions

    queue = given.queue
    options = SchedulerOptions(
        gateways_endpoint=given.gateways_endpoint,
        executors_endpoint=given.executors_endpoint,
        keys=scheduler_keys(given.curve_secret_file, given.curve_clients),
        max_step_tokens=given.max_step_tokens,
        max_queue=queue.max_queue,
        max_queue_tokens=queue.max_queue_tokens,
        ttft_limit_ms=queue.ttft_limit_ms,
        ageing_ms=queue.ageing_ms,
        tenant_weights=tenant_weights(queue.tenant_weight),
        prefix_cache=queue.prefix_cache == "on",
        recovery_timeout_s=given.recovery_timeout,
        step_timeout_s=given.step_timeout,
        host=given.host,
        metrics_port=given.metrics_port or None,
        **vars(given.steps),
        **vars(given.journal),
        **vars(given.logging),
    )
    return run(options)


@dataclass(frozen=True, kw_only=True)
class ExecutorCommand:
    """Options of ``paternoster executor``."""

    name: o.Name = ""
    scheduler: o.ExecutorScheduler = "tcp://127.0.0.1:5702"
    model: o.ModelFolder = ""
    curve_secret_file: o.CurveSecretFile = ""
    curve_scheduler_file: o.CurveSchedulerFile = ""
    backend: o.BackendOption = "torch"
    compute: Compute
    size: Size
    threads: o.Threads = None
    drain_timeout: o.DrainTimeout = 4
    step_timeout: o.StepTimeout = 60
    host: o.MetricsHost = "127.0.0.1"
    metrics_port: o.MetricsPort = 9102
    logging: Logging


@takes(ExecutorCommand)
def executor(given: ExecutorCommand) -> int:
    """Run one executor: the model and its KV cache."""
    choose_wait()
    from services.executor.main import run
    from services.executor.options import ExecutorOptions

    options = ExecutorOptions(
        name=given.name or socket.gethostname(),
        scheduler=given.scheduler,
        keys=peer_keys(given.curve_secret_file, given.curve_scheduler_file),
        model=_model_folder(given.model, given.backend),
        backend=given.backend,
        threads=given.threads,
        drain_timeout_s=given.drain_timeout,
        step_timeout_s=given.step_timeout,
        host=given.host,
        metrics_port=given.metrics_port or None,
        **vars(given.compute),
        **vars(given.size),
        **vars(given.logging),
    )
    return run(options)


def tenant_weights(given: list[str] | None) -> dict[str, float]:
    """Weights by tenant; the last one given for a tenant counts. Raises BadParameter."""
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


def _served_name(given: GatewayCommand) -> str:
    if given.served_model_name:
        return given.served_model_name
    return "fake" if given.backend == "fake" else Path(given.model).name


def _model_folder(model: str, backend: str) -> str:
    if backend == "torch" and not (Path(model) / "config.json").is_file():
        what = f"{model!r} is not a model folder;" if model else "a model folder is needed;"
        raise typer.BadParameter(f"{what} 'paternoster model fetch REF DIR' fills one", param_hint="--model")
    return model

"""Which processes make a system, and the command line of each.

Called by ``tools.up``. The children are started through this same program's commands; nothing of a service is imported.
"""

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.config import ENV_PREFIX
from tools import model
from tools import options as o
from tools.child import ChildSpec
from tools.environment import FAULTS
from tools.option_groups import Access, Compute, Http, Journal, Logging, Queue, Size, Steps
from tools.ports import LOOPBACK, LinkPorts


def command(*arguments: str) -> list[str]:
    """A command line of this very program. ``-P`` keeps a folder named ``tools`` in the user's directory out of it."""
    return [sys.executable, "-P", "-m", "tools.main", *arguments]


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """The options of ``up``; times in seconds, memory in bytes."""

    host: o.Host = "127.0.0.1"
    port: o.Port = 8000
    gateways: o.Gateways = 1
    executors: o.Executors = 1
    model: o.Model = "default"
    served_model_name: o.ServedModelName = ""
    compute: Compute
    backend: o.BackendOption = "torch"
    steps: Steps
    size: Size
    queue: Queue
    access: Access
    http: Http
    logging: Logging
    drain_timeout: o.DrainTimeout = 30
    recovery_timeout: o.RecoveryTimeout = 60
    step_timeout: o.StepTimeout = 60
    journal: Journal
    seed: o.Seed = None
    threads: o.Threads = None
    link_port: o.LinkPort = 5701
    metrics_port: o.UpMetricsPort = 9101


def children_environment() -> dict[str, str]:
    """Ours without our options: children get theirs as arguments (keys apart), and only those."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX) or name == FAULTS}
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def served_name(options: UpOptions) -> str:
    """The model's name in the API."""
    if options.served_model_name:
        return options.served_model_name
    return "fake" if options.backend == "fake" else model.name_of(options.model)


def metrics_ports(options: UpOptions) -> list[int]:
    """Every process's own port for /metrics: the scheduler's, the executors', the gateways'."""
    base = options.metrics_port
    if not base:
        return []
    executors = range(base + 1, base + 1 + options.executors)
    gateways = range(base + 100, base + 100 + options.gateways)
    return [base, *executors, *gateways]


def asked_ports(options: UpOptions) -> Iterator[tuple[str, int]]:
    """Every port that the options take, with the option it comes from."""
    yield "--port", options.port
    if options.link_port:
        yield "--link-port", options.link_port
        yield "--link-port (and the one after it)", options.link_port + 1
    for port in metrics_ports(options):
        yield "--metrics-port (and those after it)", port


def child_specs(options: UpOptions, folder: str, http: socket.socket, links: LinkPorts) -> Iterator[ChildSpec]:
    """The processes of the system: the scheduler first, everything else finds it by itself."""
    base, common = options.metrics_port, _arguments(**vars(options.logging))
    yield ChildSpec("scheduler", command("scheduler", *common, *_scheduler_arguments(options, links)))
    served = _arguments(model=folder, backend=options.backend)
    for i in range(options.executors):
        name = f"executor-{i}"
        own = _arguments(name=name, metrics_port=base + 1 + i if base else 0)
        yield ChildSpec(name, command("executor", *common, *served, *_executor_arguments(options, links), *own))
    secrets = {
        "API_KEY": " ".join(options.access.api_key or ()),
        "SSL_KEYFILE_PASSWORD": options.http.ssl_keyfile_password,
    }
    extra_env = {f"{ENV_PREFIX}{name}": value for name, value in secrets.items() if value}
    for i in range(options.gateways):
        name = f"gateway-{i}"
        own = _arguments(name=name, metrics_port=base + 100 + i if base else 0)
        argv = command("gateway", *common, *served, *_gateway_arguments(options, http, links), *own)
        yield ChildSpec(name, argv, extra_env, pass_fds=(http.fileno(),))


def _scheduler_arguments(options: UpOptions, links: LinkPorts) -> list[str]:
    return _arguments(
        gateways_endpoint=f"tcp://{LOOPBACK}:{links.gateways}",
        executors_endpoint=f"tcp://{LOOPBACK}:{links.executors}",
        recovery_timeout=options.recovery_timeout,
        step_timeout=options.step_timeout,
        metrics_port=options.metrics_port,
        journal=_absolute(options.journal.journal),
        journal_redact=options.journal.journal_redact,
        **vars(options.steps),
        **vars(options.queue),
    )


def _executor_arguments(options: UpOptions, links: LinkPorts) -> list[str]:
    # One executor alone finds its number of threads itself; several on one machine must not take the same cores.
    share = max(1, len(os.sched_getaffinity(0)) // options.executors) if options.executors > 1 else None
    return _arguments(
        scheduler=f"tcp://{LOOPBACK}:{links.executors}",
        threads=options.threads or share,
        step_timeout=options.step_timeout,
        **vars(options.compute),
        **vars(options.size),
    )


def _gateway_arguments(options: UpOptions, http: socket.socket, links: LinkPorts) -> list[str]:
    """Without secrets: anybody on the machine may read a command line."""
    host, port = http.getsockname()[:2]
    told = vars(options.http) | {
        "ssl_certfile": _absolute(options.http.ssl_certfile),
        "ssl_keyfile": _absolute(options.http.ssl_keyfile),
        "ssl_keyfile_password": None,
    }
    return _arguments(
        scheduler=f"tcp://{LOOPBACK}:{links.gateways}",
        served_model_name=served_name(options),
        host=host,
        port=port,
        fd=http.fileno(),
        api_key_file=_absolute(options.access.api_key_file),
        cors_origin=options.access.cors_origin,
        drain_timeout=options.drain_timeout,
        recovery_timeout=options.recovery_timeout,
        seed=options.seed,
        **told,
    )


def _absolute(path: str) -> str:
    """For a process that may run in another folder; nothing stays nothing."""
    return str(Path(path).absolute()) if path else ""


def _arguments(**values: object) -> list[str]:
    """``max_lanes=4`` as ``--max-lanes=4``, a switch by its name, a list one by one; what is nothing is left out."""
    arguments: list[str] = []
    for name, value in values.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(option)
        elif isinstance(value, list):
            arguments += [f"{option}={one}" for one in value]
        elif value is not None and value is not False and value != "":
            arguments.append(f"{option}={value}")
    return arguments

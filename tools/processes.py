"""Which processes make a system, and the command line of each.

Called by ``tools.up``. The children are started through this same program's commands; nothing of a service is imported.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.config import ENV_PREFIX
from tools import model
from tools.child import ChildSpec
from tools.environment import FAULTS
from tools.ports import LOOPBACK, LinkPorts


def command(*arguments: str) -> list[str]:
    """A command line of this very program. ``-P`` keeps a folder named ``tools`` in the user's directory out of it."""
    return [sys.executable, "-P", "-m", "tools.main", *arguments]


@dataclass(frozen=True)
class UpOptions:
    """The options of ``up``; contract names, times in seconds, memory in bytes."""

    host: str
    port: int
    gateways: int
    executors: int
    model: str
    served_model_name: str
    device: str
    dtype: str
    quantization: str
    backend: str
    policy: str
    static_batch_size: int
    static_wait_ms: int
    max_inflight: int
    block_size: int
    num_blocks: int | None
    kv_memory: int | None
    max_lanes: int
    max_step_tokens: int
    max_model_len: int | None
    max_queue: int | None
    max_queue_tokens: int | None
    ttft_limit_ms: int | None
    ageing_ms: int
    tenant_weights: Mapping[str, float]
    prefix_cache: str
    api_keys: tuple[str, ...]
    api_key_file: str
    cors_origins: tuple[str, ...]
    ssl_certfile: str
    ssl_keyfile: str
    ssl_keyfile_password: str
    tool_call_parser: str
    reasoning_parser: str
    trust_request_chat_template: bool
    debug_endpoints: bool
    log_level: str
    log_format: str
    otlp_endpoint: str
    drain_timeout_s: float
    recovery_timeout_s: float
    step_timeout_s: float
    journal: str
    journal_redact: bool
    seed: int | None
    threads: int | None
    link_port: int
    metrics_port: int | None


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
    if base is None:
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
    base = options.metrics_port
    common = _arguments(
        log_level=options.log_level, log_format=options.log_format, otlp_endpoint=options.otlp_endpoint or None
    )
    yield ChildSpec(
        "scheduler",
        command("scheduler")
        + common
        + _arguments(
            gateways_endpoint=f"tcp://{LOOPBACK}:{links.gateways}",
            executors_endpoint=f"tcp://{LOOPBACK}:{links.executors}",
            policy=options.policy,
            static_batch_size=options.static_batch_size,
            static_wait_ms=options.static_wait_ms,
            max_inflight=options.max_inflight,
            max_queue=options.max_queue,
            max_queue_tokens=options.max_queue_tokens,
            ttft_limit_ms=options.ttft_limit_ms,
            ageing_ms=options.ageing_ms,
            prefix_cache=options.prefix_cache,
            recovery_timeout=options.recovery_timeout_s,
            step_timeout=options.step_timeout_s,
            metrics_port=base or 0,
            journal=str(Path(options.journal).absolute()) if options.journal else None,
        )
        + [f"--tenant-weight={name}={weight:g}" for name, weight in options.tenant_weights.items()]
        + (["--journal-redact"] if options.journal_redact else []),
    )
    served = _arguments(model=folder or None, backend=options.backend)
    for i in range(options.executors):
        name = f"executor-{i}"
        arguments = _executor_arguments(options, links) + _arguments(
            name=name, metrics_port=base + 1 + i if base else 0
        )
        yield ChildSpec(name, command("executor", *common, *served, *arguments))
    for i in range(options.gateways):
        name = f"gateway-{i}"
        arguments = _gateway_arguments(options, http, links) + _arguments(
            name=name, metrics_port=base + 100 + i if base else 0
        )
        secrets = {"API_KEY": " ".join(options.api_keys), "SSL_KEYFILE_PASSWORD": options.ssl_keyfile_password}
        extra_env = {f"{ENV_PREFIX}{name}": value for name, value in secrets.items() if value}
        argv = command("gateway", *common, *served, *arguments)
        yield ChildSpec(name, argv, extra_env, pass_fds=(http.fileno(),))


def _executor_arguments(options: UpOptions, links: LinkPorts) -> list[str]:
    # One executor alone finds its number of threads itself; several on one machine must not take the same cores.
    share = max(1, len(os.sched_getaffinity(0)) // options.executors) if options.executors > 1 else None
    return _arguments(
        scheduler=f"tcp://{LOOPBACK}:{links.executors}",
        device=options.device,
        dtype=options.dtype,
        quantization=options.quantization,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        kv_memory=options.kv_memory,
        max_lanes=options.max_lanes,
        max_step_tokens=options.max_step_tokens,
        max_model_len=options.max_model_len,
        threads=options.threads or share,
        step_timeout=options.step_timeout_s,
    )


def _gateway_arguments(options: UpOptions, http: socket.socket, links: LinkPorts) -> list[str]:
    host, port = http.getsockname()[:2]
    arguments = _arguments(
        scheduler=f"tcp://{LOOPBACK}:{links.gateways}",
        served_model_name=served_name(options),
        host=host,
        port=port,
        fd=http.fileno(),
        api_key_file=options.api_key_file or None,
        ssl_certfile=options.ssl_certfile or None,
        ssl_keyfile=options.ssl_keyfile or None,
        drain_timeout=options.drain_timeout_s,
        recovery_timeout=options.recovery_timeout_s,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        seed=options.seed,
    )
    for origin in options.cors_origins:
        arguments += _arguments(cors_origin=origin)
    switches = {
        "--debug-endpoints": options.debug_endpoints,
        "--trust-request-chat-template": options.trust_request_chat_template,
    }
    return arguments + [switch for switch, is_on in switches.items() if is_on]


def _arguments(**values: object) -> list[str]:
    """``max_lanes=4`` as ``--max-lanes=4``; what is None is left out."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]

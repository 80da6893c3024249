"""Everything an executor process can be told. Built by the command line; the service reads no environment itself."""

from dataclasses import dataclass
from typing import Literal

from shared.net.curve import PeerKeys


@dataclass(frozen=True)
class ExecutorOptions:
    """Options of one executor process."""

    name: str = "executor"
    scheduler: str = "tcp://127.0.0.1:5702"
    """Endpoint the scheduler binds for executors."""
    keys: PeerKeys | None = None
    """For a scheduler that asks for them; None is none."""
    model: str = ""
    """Model folder; not read by the fake backend."""
    backend: Literal["torch", "fake"] = "torch"
    device: str = "auto"
    dtype: str = "auto"
    quantization: Literal["none", "int8"] = "none"
    block_size: int = 16
    num_blocks: int | None = None
    """None: as many as fit ``kv_memory``."""
    kv_memory: int | None = None
    """Bytes for KV blocks; None: the backend's own choice."""
    max_lanes: int = 64
    max_step_tokens: int = 512
    max_model_len: int | None = None
    """Context length to serve; None: the model's own."""
    threads: int | None = None
    host: str = "127.0.0.1"
    """Where ``metrics_port`` listens."""
    metrics_port: int | None = None
    log_level: str = "info"
    log_format: str = "text"
    """``text`` or ``json``."""
    otlp_endpoint: str = ""
    """Of a collector that takes spans over OTLP/HTTP; empty is none."""
    drain_timeout_s: float = 4.0
    """How long running requests may take to end once the process is told to stop; the rest goes on elsewhere."""
    step_timeout_s: float = 60.0
    """A step that runs longer ends the process, so that a supervisor starts a new one."""

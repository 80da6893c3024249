"""Options of one scheduler process. Built by ``tools`` from the command line; imports no service."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.net.curve import SchedulerKeys


@dataclass(frozen=True)
class SchedulerOptions:
    """What an operator may choose. Limits of executors are not here: they travel by hello."""

    gateways_endpoint: str = "tcp://127.0.0.1:5701"
    """Where gateways connect (a ZeroMQ endpoint to bind)."""
    executors_endpoint: str = "tcp://127.0.0.1:5702"
    """Where executors connect."""
    keys: SchedulerKeys | None = None
    """Asks for keys on both links; None lets anybody in who reaches them."""
    max_inflight: int = 2
    """Steps outstanding per executor: 1 or 2."""
    max_step_tokens: int | None = None
    """Most rows in one step; None leaves it to each executor."""
    policy: str = "continuous"
    """How steps are composed; the others are there to be compared with."""
    static_batch_size: int = 8
    """Requests in a batch of the policy ``static``."""
    static_wait_ms: int = 100
    """How long the first request of such a batch waits for the batch to fill."""
    max_queue: int | None = None
    """Most waiting requests before a submit is rejected; None is no limit."""
    max_queue_tokens: int | None = None
    """The same for their known tokens."""
    ttft_limit_ms: int | None = None
    """A submit whose first token is predicted to come later is rejected; None is no limit."""
    ageing_ms: int = 10_000
    """How long a priority may wait without being served before it has a turn."""
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    """Shares of tenants; 1 for those not named."""
    prefix_cache: bool = True
    """Keep the KV of what was computed, and share it among requests that begin alike."""
    recovery_timeout_s: float = 60.0
    """How long requests wait for an executor when none is connected any more."""
    step_timeout_s: float = 60.0
    """A step older than this is a lost executor."""
    journal: str = ""
    """File where every event is written down for ``paternoster replay``; empty is none."""
    journal_redact: bool = False
    """Replace token ids in the journal, so that it tells no text."""
    host: str = "127.0.0.1"
    """Address of the metrics server."""
    metrics_port: int | None = None
    """Port of ``/metrics`` and ``/health``; 0 picks one, None is no server."""
    log_level: str = "info"
    log_format: str = "text"
    """``text`` or ``json``."""
    otlp_endpoint: str = ""
    """Of a collector that takes spans over OTLP/HTTP; empty is none."""

"""The scheduler's own settings. What an executor can hold is the executor's to say (``ExecutorLimits``)."""

from math import inf
from typing import Literal, get_args

from msgspec import Struct

Policy = Literal["continuous", "prefill-first", "static"]
"""How steps are composed, see ``policies``."""


class Settings(Struct, frozen=True, array_like=True):
    """Settings of one scheduler, fixed for its life. Times are milliseconds. Raises ValueError for nonsense."""

    max_inflight: int = 2
    """Steps that may be outstanding on one executor: 1, or 2 to plan while a step runs."""
    max_step_tokens: int | None = None
    """Most rows in one step, below what the executor itself allows; None: the executor's own limit."""
    step_time_budget_ms: int = 100
    """Prefill chunks are cut so that a step is predicted to take no longer than this."""
    recovery_timeout_ms: int = 60_000
    """How long a request waits while no connected executor could ever hold it."""
    step_timeout_ms: int = 60_000
    """An executor that works longer than this on one step is given up."""
    max_queue: int | None = None
    """Most requests waiting; new ones beyond it are rejected. None: no limit."""
    retry_after_ms: int = 1000
    """What a request turned away from a full queue is told while nothing was measured yet."""
    policy: Policy = "continuous"
    static_batch_size: int = 8
    """Requests in one batch of the policy ``static``."""
    static_wait_ms: int = 100
    """How long the first request of a batch of the policy ``static`` waits for the batch to fill."""
    ageing_ms: int = 10_000
    """A priority from which nobody was admitted for so long, while requests of it waited, has the next turn."""
    tenant_weights: dict[str, float] = {}
    """Shares of tenants; 1 for those not named."""
    max_queue_tokens: int | None = None
    """Most tokens of waiting requests, known ones; new requests beyond it are rejected. None: no limit."""
    ttft_limit_ms: int | None = None
    """A request whose first token is predicted to come later than this is rejected. None: no limit."""
    prefix_cache: bool = True
    """Whether blocks of tokens that were computed are kept and shared."""
    prefix_wait_ms: int = 200
    """How long a waiting request is kept for the executor that holds its longest prefix; 0 is not at all."""
    kv_reserve: bool = False
    """Keep blocks for each request's longest output from its admission on, as engines did before paging. Slots that
    nobody fills are nobody's: it is here to be compared with."""

    @property
    def step_time_budget_us(self) -> int:
        """The same in the unit of what is predicted."""
        return 1000 * self.step_time_budget_ms

    def __post_init__(self) -> None:
        if self.max_inflight not in (1, 2):
            raise ValueError(f"max_inflight is 1 or 2, not {self.max_inflight}")
        if self.policy not in get_args(Policy):
            raise ValueError(f"policy is one of {', '.join(get_args(Policy))}, not {self.policy}")
        for name in ("step_time_budget_ms", "recovery_timeout_ms", "step_timeout_ms", "static_batch_size", "ageing_ms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("static_wait_ms", "prefix_wait_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < inf:
                raise ValueError(f"tenant_weights must be positive, not {weight} for {tenant}")
        for name in ("max_step_tokens", "max_queue", "max_queue_tokens", "ttft_limit_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive or None, not {value}")

"""The scheduler's own settings. What an executor can hold is the executor's to say (``ExecutorLimits``)."""

from msgspec import Struct


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
    """What a request turned away from a full queue is told."""

    def __post_init__(self) -> None:
        if self.max_inflight not in (1, 2):
            raise ValueError(f"max_inflight is 1 or 2, not {self.max_inflight}")
        for name in ("step_time_budget_ms", "recovery_timeout_ms", "step_timeout_ms"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("max_step_tokens", "max_queue"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive or None, not {value}")

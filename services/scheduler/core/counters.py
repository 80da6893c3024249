"""What the scheduler counts, for metrics. Only ever added to; nothing decides by it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since the scheduler started."""

    submitted: int = 0
    resubmitted: int = 0
    accepted: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    """By code."""
    ended: dict[str, int] = field(default_factory=dict)
    """By finish reason; ``abandoned`` for those whose gateway left."""
    admitted: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked for in a prefix cache, at each request's first admission."""
    prefix_hits: int = 0
    """Those of them that were found."""
    preempted: int = 0
    lost: int = 0
    """Requests that went back to the queue because their executor was lost."""
    numerics_changed: int = 0
    """Requests that went on, with output, on an executor whose results may differ in their last bits."""
    prompt_tokens: int = 0
    """Of accepted requests."""
    output_tokens: int = 0
    """Delivered to gateways."""
    steps: int = 0
    failed_steps: int = 0
    computed_tokens: int = 0
    """Rows of steps that ran, those computed again after a preemption included."""
    executors_joined: int = 0
    executors_lost: int = 0
    executors_drained: int = 0
    """Executors that left in peace."""
    executors_refused: int = 0
    stale: dict[str, int] = field(default_factory=dict)
    """Messages that came too late or for nobody, by kind; each was ignored."""
    violations: int = 0
    """Executors dropped because they broke the protocol."""


def count(table: dict[str, int], key: str, amount: int = 1) -> None:
    """Add to one entry of a table."""
    table[key] = table.get(key, 0) + amount

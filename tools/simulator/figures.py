"""From single requests to the figures of one simulated run. Filled by ``engine``; pure."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from tools.bench.figures import PERCENTS, Limits, percentile


@dataclass
class Tally:
    """What a run has seen so far; times in microseconds of virtual time."""

    limits: Limits
    ttft_us: "array[int]" = field(default_factory=lambda: array("q"))
    tpot_us: "array[float]" = field(default_factory=lambda: array("d"))
    ended: int = 0
    failed: int = 0
    rejected: int = 0
    good: int = 0
    output_tokens: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    last_end_us: int = 0
    steps: int = 0
    held: int = 0
    """Requests on lanes, summed over samples taken while somebody waits."""
    stored: int = 0
    """Slots that hold a token's KV, summed over the same samples."""
    slots: int = 0
    samples: int = 0

    def answered(
        self, arrived_us: int, first_us: int, now_us: int, prompt: int, output: int, cached: int, client_us: int
    ) -> None:
        """A request has got its whole answer; its client sees the first token ``client_us`` later."""
        ttft_us = first_us - arrived_us + client_us
        tpot_us = (now_us - first_us) / (output - 1) if output > 1 else None
        self.ttft_us.append(ttft_us)
        if tpot_us is not None:
            self.tpot_us.append(tpot_us)
        limits = self.limits
        late = limits.ttft_ms is not None and ttft_us > limits.ttft_ms * 1000
        slow = limits.tpot_ms is not None and tpot_us is not None and tpot_us > limits.tpot_ms * 1000
        self.good += not late and not slow
        self.ended += 1
        self.output_tokens += output
        self.input_tokens += prompt
        self.cached_tokens += cached
        self.last_end_us = now_us

    def sample(self, held: int, stored: int, slots: int) -> None:
        """One look at an executor while somebody waits."""
        self.held += held
        self.stored += stored
        self.slots += slots
        self.samples += 1


@dataclass(frozen=True)
class Row:
    """One run; the names are those of the JSON."""

    executors: int
    requests: int
    output_tokens_per_s: float
    input_tokens_per_s: float
    requests_per_s: float
    goodput_rps: float
    good_share: float
    ttft_ms: dict[str, float | None]
    tpot_ms: dict[str, float | None]
    busy_share: float | None
    preemptions: int
    cache_hit_rate: float
    steps: int
    rejected: int
    failed: int
    held_per_executor: float | None
    """Requests on lanes at once, mean while somebody waits."""
    stored_share: float | None
    """Share of the pool that holds data, mean while somebody waits."""
    seconds: float
    """Virtual."""
    events: int
    events_per_s: float
    """Of real time."""
    settings: dict[str, Any]
    """What this run differs by from others of a sweep."""


def sum_up(
    tally: Tally,
    executors: int,
    busy_share: float | None,
    preemptions: int,
    events: int,
    real_s: float,
    settings: dict[str, Any],
) -> Row:
    """All figures of a run that has ended."""
    seconds = max(tally.last_end_us, 1) / 1e6
    known = tally.ended + tally.rejected + tally.failed
    return Row(
        executors=executors,
        requests=known,
        output_tokens_per_s=round(tally.output_tokens / seconds, 1),
        input_tokens_per_s=round(tally.input_tokens / seconds, 1),
        requests_per_s=round(tally.ended / seconds, 3),
        goodput_rps=round(tally.good / seconds, 3),
        good_share=round(tally.good / known, 4) if known else 0.0,
        ttft_ms=_percentiles(tally.ttft_us),
        tpot_ms=_percentiles(tally.tpot_us),
        busy_share=None if busy_share is None else round(busy_share, 4),
        preemptions=preemptions,
        cache_hit_rate=round(tally.cached_tokens / tally.input_tokens, 4) if tally.input_tokens else 0.0,
        steps=tally.steps,
        rejected=tally.rejected,
        failed=tally.failed,
        held_per_executor=round(tally.held / tally.samples, 2) if tally.samples else None,
        stored_share=round(tally.stored / tally.slots, 4) if tally.slots else None,
        seconds=round(seconds, 3),
        events=events,
        events_per_s=round(events / real_s) if real_s > 0 else 0,
        settings=settings,
    )


def _percentiles(values_us: "array[int] | array[float]") -> dict[str, float | None]:
    ordered = sorted(values_us)
    return {f"p{p}": round(percentile(ordered, p) / 1000, 3) if ordered else None for p in PERCENTS}

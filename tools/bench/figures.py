"""From single requests to the figures of a load test. Pure.

TTFT is the time from the request's last byte sent to its first text received; TPOT the mean gap between later tokens;
goodput counts the requests that met both limits. Called by ``tools.bench.serve``; imports the standard library only.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTS = (50, 90, 99)


@dataclass
class Outcome:
    """One request as its client saw it; times in seconds of one monotonic clock."""

    sent_at: float
    first_at: float | None = None
    """None: no text ever came."""
    last_at: float = 0.0
    """When the last text came."""
    ended_at: float = 0.0
    pieces: int = 0
    """Events that carried text."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    """As the server's usage says; None: it said nothing."""
    failure: str = ""
    """Empty: it went well."""

    @property
    def output_tokens(self) -> int:
        """Tokens by the server's own count, or events with text where it gives none."""
        return self.pieces if self.completion_tokens is None else self.completion_tokens

    @property
    def ttft_ms(self) -> float | None:
        """None: no text ever came."""
        return None if self.first_at is None else 1000 * (self.first_at - self.sent_at)

    @property
    def tpot_ms(self) -> float | None:
        """None: there was no gap to measure."""
        if self.first_at is None or self.output_tokens < 2:
            return None
        return 1000 * (self.last_at - self.first_at) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Limits:
    """What a request must meet to count for goodput; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def met_by(self, outcome: Outcome) -> bool:
        """Whether a request that went well was fast enough."""
        ttft_ms, tpot_ms = outcome.ttft_ms, outcome.tpot_ms
        slow_start = self.ttft_ms is not None and (ttft_ms is None or ttft_ms > self.ttft_ms)
        slow_text = self.tpot_ms is not None and tpot_ms is not None and tpot_ms > self.tpot_ms
        return not slow_start and not slow_text


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """Nearest-rank percentile of at least one value, sorted upwards."""
    return sorted_values[max(0, math.ceil(percent / 100 * len(sorted_values)) - 1)]


def percentiles(values: Iterable[float | None]) -> dict[str, float | None]:
    """``{"p50": .., "p90": .., "p99": ..}`` of the values that are there; None each when none is."""
    known = sorted(value for value in values if value is not None)
    return {f"p{percent}": round(percentile(known, percent), 3) if known else None for percent in PERCENTS}


@dataclass(frozen=True)
class Figures:
    """The result of one load test."""

    seconds: float
    """From the first request sent to the last one ended."""
    requests: int
    failed: int
    output_tokens_per_s: float
    input_tokens_per_s: float
    requests_per_s: float
    goodput_rps: float
    ttft_ms: dict[str, float | None]
    tpot_ms: dict[str, float | None]
    mean_prompt_tokens: float | None
    mean_output_tokens: float | None
    client_cpu_share: float
    """Of one core; near 1 the client was the bottleneck."""
    failures: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON-able dict."""
        return dict(vars(self))


def summarize(outcomes: Sequence[Outcome], limits: Limits, client_cpu_s: float) -> Figures:
    """Figures of at least one request; failed ones count only as failed."""
    good = [outcome for outcome in outcomes if not outcome.failure]
    seconds = max(outcome.ended_at for outcome in outcomes) - min(outcome.sent_at for outcome in outcomes)
    per_s = 1 / seconds if seconds > 0 else 0.0
    output_tokens = sum(outcome.output_tokens for outcome in good)
    input_tokens = sum(outcome.prompt_tokens or 0 for outcome in good)
    return Figures(
        seconds=round(seconds, 3),
        requests=len(outcomes),
        failed=len(outcomes) - len(good),
        output_tokens_per_s=round(output_tokens * per_s, 3),
        input_tokens_per_s=round(input_tokens * per_s, 3),
        requests_per_s=round(len(good) * per_s, 3),
        goodput_rps=round(sum(map(limits.met_by, good)) * per_s, 3),
        ttft_ms=percentiles(outcome.ttft_ms for outcome in good),
        tpot_ms=percentiles(outcome.tpot_ms for outcome in good),
        mean_prompt_tokens=round(input_tokens / len(good), 1) if good else None,
        mean_output_tokens=round(output_tokens / len(good), 1) if good else None,
        client_cpu_share=round(client_cpu_s * per_s, 3),
        failures=dict(Counter(outcome.failure for outcome in outcomes if outcome.failure).most_common()),
    )

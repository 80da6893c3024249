"""Spans of requests in the executor: one for each time on a lane. Called by the shell, on the loop."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

from shared.metrics import harmless
from shared.tracing import Span, Tracing
from shared.wire import tokens
from shared.wire.executor import BatchFailed, BatchPlan, BatchResult


@dataclass
class _Stay:
    """One request on a lane."""

    span: Span
    steps: int = 0
    computed: int = 0
    """Tokens."""
    busy_us: int = 0
    """Time of the steps it took part in; others took part in them, too."""
    last_ns: int = 0
    """When the last of them was answered."""


class Traces:
    """Of requests whose plans say where their spans belong."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._stays: dict[int, _Stay] = {}
        """By lane."""

    @harmless
    def planned(self, plan: BatchPlan) -> None:
        """A plan has come: some leave their lanes, others step on."""
        if self._stays and plan.retires:
            self._end(tokens.unpack(plan.retires))
        for admit in plan.admits:
            if admit.trace:
                span = self._tracing.start("execute", admit.trace)
                span.set({"lane": admit.lane, "known_tokens": tokens.count(admit.tokens)})
                self._stays[admit.lane] = _Stay(span, last_ns=time.time_ns())

    @harmless
    def answered(self, plan: BatchPlan, answer: BatchResult | BatchFailed) -> None:
        """A plan's step has been run, or has failed."""
        if not self._stays:
            return
        now_ns = time.time_ns()
        lanes, counts = tokens.unpack(plan.work_lanes), tokens.unpack(plan.work_counts)
        for lane, count in zip(lanes, counts, strict=True):
            stay = self._stays.get(lane)
            if stay is None:
                continue
            stay.steps += 1
            stay.last_ns = now_ns
            if isinstance(answer, BatchResult):
                stay.computed += count
                stay.busy_us += answer.run_us
            else:
                stay.span.event("a step failed", {"kind": answer.kind})

    @harmless
    def cleared(self) -> None:
        """The session is over: every lane is empty."""
        self._end(list(self._stays))

    def _end(self, lanes: Iterable[int]) -> None:
        for lane in lanes:
            stay = self._stays.pop(lane, None)
            if stay is not None:
                stay.span.set(
                    {"steps": stay.steps, "computed_tokens": stay.computed, "step_seconds": stay.busy_us / 1e6}
                )
                stay.span.end(stay.last_ns)

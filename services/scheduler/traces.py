"""Spans of requests in the scheduler: how long one waits, how long it runs. A ``Watcher`` of lives.

Both are below the gateway's span of the request. The plan that puts a request on a lane tells the executor of the
second one, so that what it does is below that.
"""

from dataclasses import dataclass

import msgspec

from services.scheduler.core.lanes import Executor
from services.scheduler.lives import Life, Lives
from shared.tracing import Span, Tracing
from shared.wire.executor import Admit, BatchPlan
from shared.wire.gateway import Usage


@dataclass
class _Spans:
    """Those of one life."""

    queue: Span
    run: Span | None = None


class Traces:
    """For requests whose gateway traces them; nothing is kept of others."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def marked(self, executor: str, plan: BatchPlan, lives: Lives) -> BatchPlan:
        """The plan, with whom it admits told apart by the spans of their runs."""
        admits = []
        for admit in plan.admits:
            life = lives.of_lane(executor, admit)
            spans = life.trace if life is not None else None
            run = spans.run if isinstance(spans, _Spans) else None
            admits.append(msgspec.structs.replace(admit, trace=run.traceparent) if run is not None else admit)
        return msgspec.structs.replace(plan, admits=admits)

    def accepted(self, life: Life) -> None:
        """See ``Watcher``."""
        if life.submit.trace:
            life.trace = _Spans(self._tracing.start("queue", life.submit.trace))

    def admitted(self, life: Life, executor: Executor, admit: Admit, now: float) -> None:
        """See ``Watcher``. A second time it has come back from a preemption or a lost executor."""
        spans = life.trace
        if not isinstance(spans, _Spans):
            return
        spans.queue.end()
        if spans.run is None:
            spans.run = self._tracing.start("run", life.submit.trace)
            spans.run.set({"gen_ai.latency.time_in_queue": now - life.accepted_at})
        spans.run.event("on a lane", {"executor": executor.id, "lane": admit.lane, "cached_tokens": admit.num_cached})

    def first_token(self, life: Life, now: float) -> None:
        """See ``Watcher``."""
        spans = life.trace
        if isinstance(spans, _Spans) and spans.run is not None and life.admitted_at is not None:
            spans.run.event("first token")
            spans.run.set({"gen_ai.latency.time_in_model_prefill": now - life.admitted_at})

    def ended(self, life: Life, reason: str, usage: Usage | None, now: float) -> None:
        """See ``Watcher``."""
        spans = life.trace
        if not isinstance(spans, _Spans):
            return
        last = spans.run or spans.queue
        last.set({"gen_ai.response.finish_reasons": [reason]})
        if usage is not None:
            last.set(
                {
                    "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
                    "gen_ai.usage.completion_tokens": usage.completion_tokens,
                    "gen_ai.usage.cached_tokens": usage.cached_tokens,
                }
            )
        if life.first_at is not None:
            last.set({"gen_ai.latency.time_in_model_decode": now - life.first_at})
        if reason == "error":
            last.fail("the request failed")
        spans.queue.end()
        last.end()

"""From a submit to a request that waits, or to its refusal. Called by ``machine``; ``ledger`` has those judged again
that came before any executor.

Every submit is answered exactly once here, but for a repeat of a live id: it is dropped.
"""

from typing import TYPE_CHECKING

from services.scheduler.core import overload
from services.scheduler.core.actions import ToGateway
from services.scheduler.core.admission import Refusal, judge
from services.scheduler.core.counters import count
from services.scheduler.core.request import Request, Verb
from shared.wire.gateway import Rejected, Submit

if TYPE_CHECKING:
    from services.scheduler.core.ledger import Ledger


def take(gateway: str, submit: Submit, ledger: "Ledger") -> None:
    """Accept a new or resubmitted request, or reject it."""
    counters = ledger.counters
    counters.submitted += 1
    counters.resubmitted += submit.resubmitted
    if submit.request_id in ledger.requests[gateway]:
        # A rejection would be read as the end of the live request of that name: the repeat is dropped.
        count(counters.stale, "duplicate_submit")
        return
    try:
        request = Request(gateway, submit, ledger.queue.ticket())
    except ValueError as error:
        _reject(gateway, submit.request_id, Refusal("invalid", str(error)), ledger)
        return
    refusal = _refusal(request, ledger)
    if refusal is None:
        ledger.accept(request)
    else:
        request.move(Verb.REJECT, ledger.now_ms, refusal.code)
        _reject(gateway, submit.request_id, refusal, ledger)


def judge_now(request: Request, ledger: "Ledger") -> Refusal | None:
    """Judge as far as it is known now. A resubmitted request was accepted before: it waits for a pool that fits."""
    if ledger.facts is None or not ledger.executors:
        return None
    refusal = judge(request, ledger.facts, ledger.largest_pool)
    if refusal is not None and refusal.code == "too_long" and request.submit.resubmitted:
        # The pools may have shrunk since; the context has not: a prompt as long was never judged before.
        return refusal if request.num_prompt >= ledger.facts.context_len else None
    return refusal


def _refusal(request: Request, ledger: "Ledger") -> Refusal | None:
    if not request.num_prompt:
        return Refusal("invalid", "the prompt is empty")
    refusal = judge_now(request, ledger)
    if refusal is None and not request.submit.resubmitted:
        return ledger.quotas.refusal(request, ledger) or overload.refusal(request, ledger)
    return refusal


def _reject(gateway: str, request_id: str, refusal: Refusal, ledger: "Ledger") -> None:
    count(ledger.counters.rejected, refusal.code)
    rejected = Rejected(request_id, refusal.code, refusal.detail, refusal.retry_after_ms)
    ledger.outbox.put(ToGateway(gateway, rejected))

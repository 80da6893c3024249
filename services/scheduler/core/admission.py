"""Who may come in: what never fits, and what fits now.

Called by ``ledger`` and ``planner``.
"Never" is told apart from "not now" once and for all when the pools are known (``judge``); a request that does not fit
now lets a bounded number of others pass, then holds the door until it fits.
"""

from collections.abc import Callable
from typing import NamedTuple

from services.scheduler.core.lanes import Executor
from services.scheduler.core.request import Request
from services.scheduler.core.waiting import MAX_OVERTAKES, WaitingQueue
from shared.wire.facts import ModelFacts
from shared.wire.gateway import RejectCode
from shared.wire.sampling import problem_of

LOOKAHEAD = 32
"""Waiting requests one plan looks at: the cost of a tick does not grow with the queue."""


class Refusal(NamedTuple):
    """Why a request is turned away."""

    code: RejectCode
    detail: str
    retry_after_ms: int = 0
    """When the same request would be taken if nothing else came; 0: never."""


def judge(request: Request, facts: ModelFacts, largest: int) -> Refusal | None:
    """Settle a request's limit and stop tokens against the model and the pools, or say why it can never be served.

    ``max_tokens`` is cut to what the context and the ``largest`` empty pool hold, both in tokens. Changes nothing when
    it refuses.
    """
    if max(request.tokens) >= facts.vocab_size:
        return Refusal("invalid", f"a token id is outside the vocabulary of {facts.vocab_size}")
    if problem := problem_of(request.submit.sampling, facts.vocab_size):
        return Refusal("invalid", problem)
    if request.num_prompt >= facts.context_len:
        detail = f"the prompt has {request.num_prompt} tokens; the context length is {facts.context_len}"
        return Refusal("too_long", detail)
    if len(request.tokens) + 1 > largest and request.num_prompt + request.submit.max_tokens > len(request.tokens):
        detail = f"{len(request.tokens)} tokens and one more do not fit the largest executor, which holds {largest}"
        return Refusal("too_long", detail)
    request.limit = min(request.num_prompt + request.submit.max_tokens, facts.context_len, largest)
    eos = [] if request.submit.ignore_eos else facts.eos_token_ids
    request.stops = frozenset([*request.stop_token_ids, *eos])
    return None


def fits_ever(request: Request, num_slots: int) -> bool:
    """Whether an empty pool of so many slots holds all of a request's tokens and one more."""
    return len(request.tokens) + 1 <= num_slots


def room(executor: Executor, promised: int, anyone_runs: bool) -> int:
    """Blocks to admit into: the available ones less ``promised`` (what started prefills still need) and a watermark.

    The watermark leaves running decodes something to grow into; it is none where nobody runs.
    """
    watermark = max(1, executor.limits.num_blocks // 100) if anyone_runs else 0
    return executor.pool.num_available - promised - watermark


class Picked(NamedTuple):
    """Who could be admitted now, in order."""

    chosen: list[Request]
    blocked: Request | None
    """The first that does not fit now."""
    num_before: int
    """How many of the chosen do not overtake it."""


def candidates(
    executor: Executor,
    queue: WaitingQueue,
    *,
    promised: int,
    most: int,
    excluded: list[Request],
    tokens_needed: Callable[[Request, Executor], int],
    is_kept: Callable[[Request, Executor], bool],
) -> Picked:
    """Up to ``most`` waiting requests the executor could admit now, with room for ``tokens_needed`` each.

    Those that are kept for another executor are passed over.
    """
    chosen: list[Request] = []
    blocked: Request | None = None
    num_before = 0
    passes = MAX_OVERTAKES
    free = room(executor, promised, bool(executor.lanes))
    for request in queue.head(LOOKAHEAD):
        if len(chosen) == most or not passes:
            break
        if request in excluded or not fits_ever(request, executor.num_slots) or is_kept(request, executor):
            continue
        need = executor.need(request, tokens_needed(request, executor))
        if need <= free:
            chosen.append(request)
            free -= need
            passes -= blocked is not None
            num_before += blocked is None
        elif blocked is None:
            blocked = request
            passes = MAX_OVERTAKES - request.overtaken
    return Picked(chosen, blocked, num_before)

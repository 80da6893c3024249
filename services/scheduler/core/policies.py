"""How steps are composed: which decodes and prefills go together, and who may join when. Called by ``planner``.

Three policies behind one small interface. ``continuous`` is the product; the other two are how engines worked before
it, and are here to be compared with. All three obey the same order, budgets in rows, block accounting and recovery;
a request's tokens are the same under each.
"""

from typing import TYPE_CHECKING, Protocol

from services.scheduler.core.lanes import Executor
from services.scheduler.core.limits import Settings
from services.scheduler.core.request import Request
from services.scheduler.core.shares import all_join, first_come, share_out

if TYPE_CHECKING:
    from services.scheduler.core.ledger import Ledger
    from services.scheduler.core.planner import Planner
    from services.scheduler.core.turn import Turn


class Policy(Protocol):
    """What a policy decides."""

    preempts: bool
    """Whether a more urgent request may take the place of one that runs."""
    keeps_dead: bool
    """Whether the lane of a request that has ended stays taken (a *dead* lane) until ``Executor.bury``."""

    def compose(self, turn: "Turn", planner: "Planner") -> None:
        """Fill the turn's draft; no suspect is about."""

    def tokens_needed(self, request: Request, executor: Executor) -> int:
        """Tokens there must be room for to admit a request."""

    def promised(self, turn: "Turn") -> int:
        """Blocks that those admitted before have yet to get."""

    def wake_ms(self, ledger: "Ledger") -> int | None:
        """When an executor that has nothing to do now must be asked again, though nothing happened."""


class Continuous:
    """Every decode in every step; prefills, cut into chunks, share what decodes leave (Sarathi, arXiv 2403.02310)."""

    preempts = True
    keeps_dead = False

    def __init__(self, settings: Settings) -> None:
        self._reserves = settings.kv_reserve

    def compose(self, turn: "Turn", planner: "Planner") -> None:
        """Decodes, then prefills."""
        planner.make_room(turn)
        planner.decode(turn)
        planner.prefill(turn, planner.newcomers(turn), share_out)

    def tokens_needed(self, request: Request, executor: Executor) -> int:
        """What is known and one more: tables grow as the request does. Or, reserved, the most it can become."""
        return min(request.limit, executor.num_slots) if self._reserves else len(request.tokens) + 1

    def promised(self, turn: "Turn") -> int:
        """What started prefills still need; or, reserved, what every request may still come to need."""
        executor = turn.executor
        if not self._reserves:
            return sum(executor.still_needs(lane, lane.known + 1) for lane in turn.prefills)
        return sum(executor.still_needs(lane, lane.request.limit) for lane in executor.lanes.values())

    def wake_ms(self, ledger: "Ledger") -> int | None:
        """Only events bring work."""
        return None


class PrefillFirst(Continuous):
    """Whole prefills as steps of their own, before any decode: Orca (OSDI 2022) and early vLLM (arXiv 2309.06180).

    While a waiting request can be admitted, or a prompt longer than a step is not through, nobody decodes.
    """

    def compose(self, turn: "Turn", planner: "Planner") -> None:
        """Prefills; decodes only when there is none."""
        planner.make_room(turn, decodes=False)
        planner.prefill(turn, planner.newcomers(turn), first_come)
        if not turn.draft.lanes:
            planner.make_room(turn)
            planner.decode(turn)


class Static:
    """A batch is formed, prefilled, and decoded until its longest member has ended; nobody joins midway.

    As engines did before iteration-level scheduling: memory for a member's longest output is reserved when it joins,
    and the lane of one that ends early stays taken and computes nothing. A batch is formed when ``static_batch_size``
    requests wait (or as many as the executor has lanes), or of fewer once the first has waited ``static_wait_ms``.
    """

    preempts = False
    keeps_dead = True

    def __init__(self, settings: Settings) -> None:
        self._batch_size = settings.static_batch_size
        self._wait_ms = settings.static_wait_ms

    def compose(self, turn: "Turn", planner: "Planner") -> None:
        """A new batch if none runs; its prefills, whole; then its decodes."""
        new: list[Request] = []
        if not turn.executor.lanes:
            turn.executor.bury()
            if self._is_full(turn.executor, planner.ledger):
                new = planner.newcomers(turn, self._batch_size)
        planner.make_room(turn, decodes=False)
        planner.prefill(turn, new, all_join)
        if not turn.draft.lanes:
            planner.make_room(turn)
            planner.decode(turn)

    def tokens_needed(self, request: Request, executor: Executor) -> int:
        """The most it can become."""
        return min(request.limit, executor.num_slots)

    def promised(self, turn: "Turn") -> int:
        """Nothing: nobody is admitted while anyone runs."""
        return 0

    def wake_ms(self, ledger: "Ledger") -> int | None:
        """When the first one waiting has waited long enough for a batch of fewer."""
        for request in ledger.queue.head(1):
            return request.waits_since_ms + self._wait_ms
        return None

    def _is_full(self, executor: Executor, ledger: "Ledger") -> bool:
        if len(ledger.queue) >= min(self._batch_size, len(executor.free_lanes)):
            return True
        wake_ms = self.wake_ms(ledger)
        return wake_ms is not None and ledger.now_ms >= wake_ms


def choose(settings: Settings) -> Policy:
    """The policy that the settings name."""
    match settings.policy:
        case "continuous":
            return Continuous(settings)
        case "prefill-first":
            return PrefillFirst(settings)
        case "static":
            return Static(settings)

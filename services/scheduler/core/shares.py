"""How prefills share what decodes leave of a step: pure functions over numbers. Called by ``planner``.

The shortest remaining prefill goes first, so that a long prompt makes no short one wait; the oldest keeps a quarter of
what is left, so that it is never starved by a stream of short ones. Shortest-first within a token budget is Sarathi's
chunked prefill (arXiv 2403.02310) with shortest-remaining-time order.
"""

from typing import NamedTuple

from services.scheduler.core.cost import StepCost, chunk_reads
from services.scheduler.core.lanes import Lane
from services.scheduler.core.request import Rank, Request

OLDEST_SHARE = 4
"""The oldest prefill keeps one part in this many."""


class Prefill(NamedTuple):
    """A request with more than one token to compute; without a lane it is still waiting."""

    rank: Rank
    request: Request
    lane: Lane | None
    start: int
    remaining: int


class Share(NamedTuple):
    """What a prefill may compute in this step."""

    prefill: Prefill
    num_tokens: int


class Budget:
    """What is left of a step, in rows and, once steps have been measured, in predicted time."""

    __slots__ = ("_cost", "left_us", "rows")

    def __init__(self, cost: StepCost, rows: int, reads: int, max_rows: int, wanted_us: int) -> None:
        """Of ``max_rows``, and the time of a step that is to take ``wanted_us``, ``rows`` decodes that read ``reads``
        tokens are taken."""
        self._cost = cost
        self.rows = max_rows - rows
        self.left_us = cost.budget_us(wanted_us) - cost.step_us(rows, reads)

    def most(self, start: int, wanted: int) -> int:
        """Most rows from ``start`` on, up to ``wanted``, that are left."""
        wanted = min(wanted, self.rows)
        return self._cost.most_rows(start, wanted, self.left_us) if self._cost.fitted and wanted > 0 else wanted

    def spend(self, start: int, num_tokens: int) -> None:
        """Take rows; give them back with a negative number of the same rows."""
        self.rows -= num_tokens
        self.left_us -= self._cost.chunk_us(num_tokens, chunk_reads(start, num_tokens))

    def keep_back(self, prefill: Prefill, block_size: int) -> "Kept":
        """Set the oldest's part aside: a quarter, and at least a block, lest decodes that fill a step starve it."""
        rows = max(1, self.rows // OLDEST_SHARE)
        if self._cost.fitted:
            rows = min(rows, self._cost.most_rows(prefill.start, rows, self.left_us / OLDEST_SHARE))
        rows = min(prefill.remaining, self.rows, max(rows, block_size))
        kept = Kept(rows, self._cost.chunk_us(rows, chunk_reads(prefill.start, rows)))
        self.rows -= kept.rows
        self.left_us -= kept.us
        return kept

    def put_back(self, kept: "Kept") -> None:
        """The oldest's turn has come: its part is in the budget again."""
        self.rows += kept.rows
        self.left_us += kept.us


class Kept(NamedTuple):
    """What was set aside for the oldest."""

    rows: int
    us: float


def share_out(prefills: list[Prefill], budget: Budget, block_size: int) -> list[Share]:
    """Share the budget among prefills; those that get nothing are left out. The result is in order of rank."""
    if not prefills or budget.rows <= 0:
        return []
    oldest = min(prefills)
    kept = budget.keep_back(oldest, block_size)
    shares: list[Share] = []
    for prefill in sorted(prefills, key=_shortest_first):
        most = 0
        if prefill is oldest:
            budget.put_back(kept)
            most = kept.rows
        most = max(most, budget.most(prefill.start, prefill.remaining))
        num_tokens = cut(prefill.start, prefill.remaining, most, block_size)
        if num_tokens:
            budget.spend(prefill.start, num_tokens)
            shares.append(Share(prefill, num_tokens))
    return sorted(shares)


def first_come(prefills: list[Prefill], budget: Budget, block_size: int) -> list[Share]:
    """Whole prefills in order of rank while they fit into the rows; one that no step can hold is cut, and is alone."""
    shares: list[Share] = []
    rows = budget.rows
    for prefill in sorted(prefills):
        if prefill.remaining > rows:
            if not shares and rows > 0:
                num_tokens = cut(prefill.start, prefill.remaining, rows, block_size)
                # One token left over would look like a decode, and run beside decodes.
                num_tokens -= num_tokens > 1 and prefill.remaining - num_tokens == 1
                shares.append(Share(prefill, num_tokens))
            break
        shares.append(Share(prefill, prefill.remaining))
        rows -= prefill.remaining
    return shares


def all_join(prefills: list[Prefill], budget: Budget, block_size: int) -> list[Share]:
    """As ``first_come``, and new requests that get nothing in this step are admitted all the same."""
    shares = first_come(prefills, budget, block_size)
    given = {share.prefill.rank for share in shares}
    return sorted(shares + [Share(p, 0) for p in prefills if p.lane is None and p.rank not in given])


def cut(start: int, remaining: int, most: int, block_size: int) -> int:
    """Tokens of the next chunk: all that remain, or up to a block boundary, or what a budget below a block leaves."""
    if most >= remaining:
        return remaining
    end = (start + most) // block_size * block_size
    return end - start if end > start else most


def _shortest_first(prefill: Prefill) -> tuple[int, Rank]:
    return prefill.remaining, prefill.rank

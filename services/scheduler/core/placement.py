"""Which executor takes which request: executors with room pull from the shared queue. Called by ``machine``.

Executors that can plan at the same moment share what waits: the one with the fewest lanes in use goes first, and none
takes more than its part. Who waits for one that cannot plan now does so for a bounded time only (``preference``).
"""

from collections.abc import Iterable

from services.scheduler.core.lanes import Executor


def order(executors: Iterable[Executor]) -> list[Executor]:
    """The order in which executors that can plan now are asked."""
    return sorted(executors, key=_load)


def part(num_waiting: int, num_executors: int) -> int:
    """Most requests one of ``num_executors`` asked together may admit in this plan; at least one, so nothing stalls."""
    return max(1, -(-num_waiting // num_executors))


def _load(executor: Executor) -> int:
    return len(executor.lanes)

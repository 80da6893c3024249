"""Plain figures of the present moment, in the shape of the scheduler's part of ``/debug/state``. Read only.

Called by the shell, for metrics too. All that a scheduler holds is written by ``snapshot``.
"""

from typing import Any

from services.scheduler.core.lanes import Executor
from services.scheduler.core.machine import Scheduler


def debug_state(scheduler: Scheduler) -> dict[str, Any]:
    """What waits and runs, and what each executor holds."""
    ledger = scheduler.ledger
    return {
        "waiting": ledger.num_waiting,
        "running": ledger.num_running,
        "preempted": ledger.counters.preempted,
        "executors": [_of_executor(executor) for executor in scheduler.executors.values()],
    }


def _of_executor(executor: Executor) -> dict[str, Any]:
    pool = executor.pool
    return {
        "id": executor.id,
        "pid": executor.hello.pid,
        "blocks": {
            "total": pool.num_blocks,
            "free": pool.num_free,
            "cached": pool.num_cached,
            "used": pool.num_blocks - pool.num_available,
        },
        "lanes": {"total": executor.num_lanes, "used": len(executor.lanes), "dead": len(executor.dead)},
        "inflight": len(executor.inflight),
        "steps": executor.steps_done,
    }

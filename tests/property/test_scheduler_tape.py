"""Very many random events for the scheduler's core, each followed by all invariants: long runs in tiny worlds.

The same worlds, checks and accidents as ``test_scheduler.py``, but Hypothesis draws the events of a run as one string
of bytes (``tests.fakes.tape``), so a step costs what the core and its checks cost. A *step* is one drawn event that the
core handled; what brings each run to rest at its end is checked as well and not counted.
"""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, note, settings

from services.scheduler.core.limits import Settings
from shared.wire.facts import ExecutorLimits
from tests.fakes.core_settings import core_settings
from tests.fakes.scheduler_world import World
from tests.fakes.tape import KINDS, RECORD_BYTES, play

STEPS = 200_000
SOAK_STEPS = 10_000_000
EVENTS = 500
"""Drawn for one run."""
YIELD = 0.8
"""Share of the drawn ones that the core has to handle, at least."""

COMMON = settings(
    deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example]
)


def run(steps: int, common: settings) -> Counter[str]:
    """Steps that were run, by kind; somewhat more than ``steps``."""
    ran: Counter[str] = Counter()

    @settings(common, max_examples=int(steps / (EVENTS * YIELD)) + 1)
    @given(
        core_settings,
        st.sampled_from([None, 12, 24, 36]),
        st.sampled_from([False, False, False, True]),
        st.binary(min_size=EVENTS * RECORD_BYTES, max_size=EVENTS * RECORD_BYTES),
    )
    def one_run(chosen: Settings, pool_slots: int | None, replays: bool, tape: bytes) -> None:
        world = World(chosen, pool_slots=pool_slots, replays=replays)
        world.join_gateway()
        happened: list[str] = []
        try:
            for name in play(world, tape):
                happened.append(name)
                ran[name] += 1
            if not world.executors:
                world.join_executor(ExecutorLimits(pool_slots or 12, 1, 2, 8))
            world.drain()
        finally:
            note(f"{len(happened)} events: {' '.join(happened)}")

    one_run()
    return ran


def check_figures(ran: Counter[str], steps: int) -> None:
    """As many as promised, and some of each kind."""
    print(f"{ran.total():,} steps: {dict(ran.most_common())}")
    assert ran.total() >= steps
    never_handled = {"nothing", "fail_next_step", "spoil_next_sample", "hang_executor"}  # they make later steps fail
    assert set(ran) == {happening.__name__ for happening in KINDS} - never_handled


@pytest.mark.timeout(900)
def test_no_sequence_of_events_breaks_an_invariant() -> None:
    """The same steps on every run."""
    check_figures(run(STEPS, settings(COMMON, derandomize=True)), STEPS)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_nor_do_very_many() -> None:
    """Other steps on every run; failures are kept in Hypothesis's database."""
    check_figures(run(SOAK_STEPS, COMMON), SOAK_STEPS)

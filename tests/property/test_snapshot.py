"""A scheduler restored from a snapshot goes on exactly as the one it was taken of, at whatever moment."""

import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from services.scheduler.core import snapshot
from tests.property.test_scheduler import COMMON, SchedulerMachine


class RestoredMachine(SchedulerMachine):
    """``World.check_replay`` runs every event again on a scheduler that was never restored, and compares the bytes."""

    @rule()
    def restore(self):
        data = snapshot.dump(self.world.scheduler)
        self.world.scheduler = snapshot.load(data)
        assert snapshot.dump(self.world.scheduler) == data
        self.world.check()


@pytest.mark.timeout(300)
class TestRestored(RestoredMachine.TestCase):
    settings = settings(COMMON, max_examples=100, stateful_step_count=60, derandomize=True)

"""Every world's journal replays to the byte from any of its files, redacted or not."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from services.scheduler.journal import Journal
from services.scheduler.journal_format import Reader
from tests.property.test_scheduler import COMMON, SchedulerMachine
from tools import replay


class JournalMachine(SchedulerMachine):
    """Writes down whatever the world logs; files are so small that most worlds fill several."""

    redact = False
    journal = None
    written = 0
    scheduler = None

    @invariant()
    def write_down(self):
        world = self.world
        if world is None:
            return
        if world.scheduler is not self.scheduler:
            # A journal belongs to one scheduler process; the events since its birth are still in the log.
            self.replay_files()
            self.folder = tempfile.TemporaryDirectory()
            self.scheduler = world.scheduler
            born = type(world.scheduler)(world.epoch, world.settings)
            self.follower = born
            self.journal = Journal(
                Path(self.folder.name) / "journal", born, self.redact, max_bytes=20_000, keep=100_000
            )
            self.written = 0
        for event, now_ms in world.log[self.written :]:
            self.journal.record(event, now_ms, self.follower.handle(event, now_ms))
        self.written = len(world.log)

    def replay_files(self):
        if self.journal is None:
            return
        self.journal.close()
        events = 0
        for path in Path(self.folder.name).iterdir():
            reader = Reader(path)
            events += replay.run(reader).events.total()
            assert not reader.damage
        assert self.redact or events == self.written
        self.journal = None
        self.folder.cleanup()

    def teardown(self):
        super().teardown()
        if self.world is not None and not self.world.broken:
            self.write_down()
            self.replay_files()


class RedactedMachine(JournalMachine):
    redact = True


@pytest.mark.timeout(300)
class TestJournal(JournalMachine.TestCase):
    settings = settings(COMMON, max_examples=20, stateful_step_count=50, derandomize=True)


@pytest.mark.timeout(300)
class TestRedacted(RedactedMachine.TestCase):
    settings = settings(COMMON, max_examples=20, stateful_step_count=50, derandomize=True)

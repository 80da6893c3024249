"""The journal's files: bounded, readable after a crash, and silent about text when told so."""

import logging
from pathlib import Path
from typing import BinaryIO

import pytest

from services.scheduler import journal as journal_module
from services.scheduler.core.actions import Action
from services.scheduler.core.events import Event, GatewayJoined, Submitted
from services.scheduler.core.limits import Settings
from services.scheduler.core.machine import Scheduler
from services.scheduler.journal import Journal
from services.scheduler.journal_format import MAGIC, JournalError, Reader
from shared.wire import tokens
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.gateway import Submit
from shared.wire.sampling import Constraint, Sampling
from tests.fakes.scheduler_world import World
from tools import replay

WORDS = ModelFacts("words", 1000, 64, [999], "fake")
PROMPT = [401, 402, 401, 403]


class Recorded(World):
    """A world whose events a journal writes down."""

    journal: Journal | None = None

    def happen(self, event: Event) -> list[Action]:
        actions = super().happen(event)
        if self.journal is not None:
            self.journal.record(event, self.now_ms, actions)
        return actions


def a_life(path: Path, redact: bool = False, requests: int = 6, **limits: int) -> Recorded:
    world = Recorded(Settings(), WORDS)
    world.journal = Journal(path, world.scheduler, redact, **limits)
    gateway = world.join_gateway()
    world.submit(gateway, PROMPT, 4)
    world.join_executor(ExecutorLimits(8, 4, 2, 8))
    for i in range(requests):
        world.submit(gateway, [*PROMPT, i], 8, seed=i)
        world.now_ms += 5
        world.drain()
    return world


def test_a_journal_tells_everything_again(tmp_path: Path) -> None:
    world = a_life(tmp_path / "j")
    assert world.journal is not None
    world.journal.close()
    replayed = replay.run(Reader(tmp_path / "j"))
    assert replayed.events.total() == len(world.log)
    assert replayed.scheduler.counters == world.scheduler.counters


def test_files_are_bounded_and_each_one_replays_alone(tmp_path: Path) -> None:
    world = a_life(tmp_path / "j", requests=60, max_bytes=8000, keep=3)
    assert world.journal is not None
    world.journal.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["j", "j.1", "j.2", "j.3"]
    for file in files:
        assert file.stat().st_size < 12_000
        assert replay.run(Reader(file)).events.total() > 0
    assert replay.run(Reader(files[0])).scheduler.counters == world.scheduler.counters


class Reluctant:
    """A file that takes little at a time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: bytearray) -> int:
        return self._file.write(data[:1000])

    def close(self) -> None:
        self._file.close()


def test_nothing_is_lost_when_the_system_takes_less_than_all(tmp_path: Path) -> None:
    world = a_life(tmp_path / "j")
    assert world.journal is not None
    world.journal._file = Reluctant(world.journal._file)  # type: ignore[assignment, arg-type]
    world.journal.close()
    reader = Reader(tmp_path / "j")
    assert replay.run(reader).events.total() == len(world.log)
    assert not reader.damage


def test_what_a_crashed_scheduler_has_left_is_kept(tmp_path: Path) -> None:
    (tmp_path / "j").write_bytes(b"before")
    Journal(tmp_path / "j", Scheduler(1, Settings())).close()
    assert (tmp_path / "j.1").read_bytes() == b"before"
    assert (tmp_path / "j").read_bytes().startswith(MAGIC)


@pytest.mark.parametrize("cut", [1, 5, 9, 20])
def test_a_cut_last_record_is_told_and_the_rest_replays(tmp_path: Path, cut: int) -> None:
    world = a_life(tmp_path / "j")
    assert world.journal is not None
    world.journal.close()
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[:-cut])
    reader = Reader(tmp_path / "j")
    assert replay.run(reader).events.total() == len(world.log) - 1
    assert "is cut" in reader.damage


def test_a_flipped_bit_ends_the_reading(tmp_path: Path) -> None:
    world = a_life(tmp_path / "j")
    assert world.journal is not None
    world.journal.close()
    data = bytearray((tmp_path / "j").read_bytes())
    data[-30] ^= 1
    (tmp_path / "j").write_bytes(data)
    reader = Reader(tmp_path / "j")
    assert replay.run(reader).events.total() < len(world.log)
    assert "checksum" in reader.damage


@pytest.mark.parametrize("data", [b"", b"something else", MAGIC, MAGIC + b"\x05\0\0\0"])
def test_what_has_no_opening_is_no_journal(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "j").write_bytes(data)
    with pytest.raises(JournalError):
        Reader(tmp_path / "j")


def test_the_event_in_which_the_core_failed_is_the_last_one(tmp_path: Path) -> None:
    core = Scheduler(1, Settings())
    journal = Journal(tmp_path / "j", core)
    journal.record(GatewayJoined("g"), 0, core.handle(GatewayJoined("g"), 0))
    nonsense = Submitted("g", Submit("r", tokens.pack([1]), Sampling(), None))  # type: ignore[arg-type]
    journal.failed(nonsense, 1)
    journal.record(GatewayJoined("g"), 2, [])  # nothing follows
    reader = Reader(tmp_path / "j")
    handled = list(reader)
    assert [type(record.event) for record in handled][:1] == [GatewayJoined]
    assert len(handled) + bool(reader.damage) == 2


def test_a_full_disk_ends_the_journal_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "WRITE_BYTES", 1)
    core = Scheduler(1, Settings())
    journal = Journal(tmp_path / "j", core)
    journal._file.close()  # type: ignore[union-attr]
    journal._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    with caplog.at_level(logging.ERROR):
        for i in range(3):
            journal.record(GatewayJoined(f"g{i}"), 0, core.handle(GatewayJoined(f"g{i}"), 0))
        journal.flush()
        journal.close()
    assert len(caplog.records) == 1
    assert "No space left on device" in caplog.text


def test_a_redacted_journal_takes_the_same_decisions_and_tells_no_token(tmp_path: Path) -> None:
    plain = a_life(tmp_path / "plain")
    redacted = a_life(tmp_path / "redacted", redact=True)
    for world in (plain, redacted):
        assert world.journal is not None
        world.journal.close()
    reader = Reader(tmp_path / "redacted")
    prompts: list[list[int]] = []

    def observe(scheduler: Scheduler, event: Event, now_ms: int, actions: list[Action]) -> None:
        if isinstance(event, Submitted):
            prompts.append(tokens.unpack(event.submit.prompt))

    replayed = replay.run(reader, observe)
    assert reader.opening.redacted
    assert replayed.events.total() == len(plain.log)
    assert replayed.scheduler.counters == plain.scheduler.counters
    first, second, third, fourth = prompts[0]
    assert first == third
    assert len({first, second, fourth}) == 3
    assert prompts[1][:4] == prompts[0]
    assert sum(ids[:4] == PROMPT for ids in prompts) == 0


def test_a_redacted_journal_before_any_executor_holds_no_prompt(tmp_path: Path) -> None:
    world = Recorded(Settings(), WORDS)
    world.journal = Journal(tmp_path / "j", world.scheduler, redact=True)
    world.submit(world.join_gateway(), PROMPT, 4)
    world.journal.close()
    assert tokens.pack(PROMPT) not in (tmp_path / "j").read_bytes()
    assert replay.run(Reader(tmp_path / "j")).events.total() == 0


@pytest.mark.parametrize("redact", [False, True])
def test_only_a_redacted_journal_is_silent_about_constraints(tmp_path: Path, redact: bool) -> None:
    world = Recorded(Settings(), WORDS)
    world.journal = Journal(tmp_path / "j", world.scheduler, redact)
    world.join_executor(ExecutorLimits(8, 4, 2, 8))
    world.submit(world.join_gateway(), PROMPT, 4, constraint=Constraint("regex", "its text"))
    world.drain()
    world.journal.close()
    assert (b"its text" in (tmp_path / "j").read_bytes()) is not redact
    assert replay.run(Reader(tmp_path / "j")).events.total() == len(world.log)


def test_a_replay_that_decides_otherwise_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = a_life(tmp_path / "j")
    assert world.journal is not None
    world.journal.close()
    monkeypatch.setattr("services.scheduler.core.planner.placement.part", lambda waiting, asked: 1)
    monkeypatch.setattr("services.scheduler.core.ledger.Ledger.finish", lambda *_, **__: None)
    with pytest.raises(replay.Divergence, match="event"):
        replay.run(Reader(tmp_path / "j"))

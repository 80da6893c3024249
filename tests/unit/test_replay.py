"""Every journal that is kept replays to the byte; a replay tells what happened to anyone."""

import shutil
from pathlib import Path

import pytest

from services.scheduler.core import invariants
from services.scheduler.core.actions import Action
from services.scheduler.core.events import Event, Submitted
from services.scheduler.core.machine import Scheduler
from services.scheduler.journal_format import MAGIC, Handled, Reader, append
from tests.unit.test_cli import paternoster
from tools import replay

FOLDER = Path(__file__).resolve().parents[1] / "data" / "journals"
JOURNALS = sorted(FOLDER.glob("*.journal"))
AGAIN = "if decisions were changed on purpose, see tests/data/journals/README.md"


def an_id(path: Path) -> str:
    return next(record.event.submit.request_id for record in Reader(path) if isinstance(record.event, Submitted))


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_a_kept_journal_replays_to_the_byte(path: Path) -> None:
    def observe(scheduler: Scheduler, event: Event, now_ms: int, actions: list[Action]) -> None:
        invariants.check(scheduler)

    reader = Reader(path)
    try:
        replayed = replay.run(reader, observe)
    except replay.Divergence as divergence:
        raise AssertionError(f"{divergence}; {AGAIN}") from None
    assert not reader.damage
    counters = replayed.scheduler.counters
    assert counters.violations == 0
    assert sum(counters.ended.values()) == counters.accepted


def test_every_kept_journal_is_explained() -> None:
    assert len(JOURNALS) >= 2
    readme = (FOLDER / "README.md").read_text()
    assert [path.name for path in JOURNALS if f"`{path.name}`" not in readme] == []


def test_what_the_kept_journals_are_kept_for() -> None:
    preempted = replay.run(Reader(FOLDER / "preemption.journal")).scheduler.counters
    lost = replay.run(Reader(FOLDER / "executor-lost.journal")).scheduler.counters
    assert preempted.preempted > 0
    assert lost.lost > 0


def test_the_command_prints_summary_story_and_picture(tmp_path: Path) -> None:
    path = FOLDER / "preemption.journal"
    request_id = an_id(path)
    answer_id = request_id.removesuffix("-0")  # what the client saw
    assert answer_id != request_id
    result = paternoster("replay", str(path), "--request", answer_id, "--picture", str(tmp_path / "p.html"))
    assert result.returncode == 0, result.stderr
    assert "every action the same" in result.stdout
    assert f"request {request_id} of gateway" in result.stdout
    assert "admit on executor" in result.stdout
    assert "finish length" in result.stdout
    assert "lane 0 |" in result.stdout
    assert (tmp_path / "p.html").read_text().count("<svg") > 1


def test_an_unknown_request_is_told(tmp_path: Path) -> None:
    result = paternoster("replay", str(FOLDER / "preemption.journal"), "--request", "nobody")
    assert "no request nobody in this file" in result.stdout


def test_a_cut_journal_is_told(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "preemption.journal", tmp_path / "j")
    (tmp_path / "j").write_bytes((tmp_path / "j").read_bytes()[:-3])
    result = paternoster("replay", str(tmp_path / "j"))
    assert result.returncode == 0
    assert "is cut" in result.stdout


@pytest.mark.parametrize("data", [None, b"no journal at all"])
def test_what_cannot_be_read_is_one_line(tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "j").write_bytes(data)
    result = paternoster("replay", str(tmp_path / "j"))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1


def rewritten(path: Path, to: Path, digest: bytes) -> None:
    """The same journal with another digest for its last event."""
    reader = Reader(path)
    *before, last = reader
    buffer = bytearray(MAGIC)
    append(buffer, reader.opening)
    for record in [*before, Handled(last.now_ms, digest, last.event)]:
        append(buffer, record)
    to.write_bytes(buffer)


def test_other_actions_are_a_divergence(tmp_path: Path) -> None:
    rewritten(JOURNALS[0], tmp_path / "j", b"otherwise")
    result = paternoster("replay", str(tmp_path / "j"))
    assert result.returncode == 1
    assert "has other actions" in result.stderr


def test_a_failure_of_the_core_is_expected_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewritten(JOURNALS[0], tmp_path / "j", b"")
    with pytest.raises(replay.Divergence, match="and no more"):
        replay.run(Reader(tmp_path / "j"))
    number_of_events = sum(1 for _ in Reader(tmp_path / "j"))
    handle, calls = Scheduler.handle, iter(range(number_of_events))

    def failing(self: Scheduler, event: Event, now_ms: int) -> list[Action]:
        if next(calls) == number_of_events - 1:
            raise RuntimeError("told to fail")
        return handle(self, event, now_ms)

    monkeypatch.setattr(Scheduler, "handle", failing)
    assert replay.run(Reader(tmp_path / "j")).crash == "RuntimeError: told to fail"

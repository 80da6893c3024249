"""``paternoster replay``: a journal run through the core again, checked action by action.

The library half, ``run``, is what tests and ``bench compare`` use; the rest prints. Called by ``tools.main``.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from services.scheduler.core import snapshot
from services.scheduler.core.actions import Action, ToGateway
from services.scheduler.core.events import Event, Submitted
from services.scheduler.core.machine import Scheduler
from services.scheduler.core.request import Request
from services.scheduler.journal_format import Handled, JournalError, Opening, Reader, digest
from shared.wire import tokens
from shared.wire.gateway import Tokens
from tools.occupancy import text
from tools.occupancy.page import Panel, page
from tools.occupancy.record import Recorder
from tools.options import told

Observer = Callable[[Scheduler, Event, int, list[Action]], None]


class Divergence(AssertionError):
    """The core decides otherwise than the one that wrote the journal."""


@dataclass
class Replayed:
    """What a journal held."""

    scheduler: Scheduler
    """As it was after the last event."""
    events: Counter[str] = field(default_factory=Counter)
    """By kind."""
    first_ms: int | None = None
    last_ms: int = 0
    crash: str = ""
    """How the core failed in the last event, if it did so before and does so again."""


def begin(opening: Opening) -> Scheduler:
    """The scheduler that the file opens with. Raises snapshot.SnapshotError."""
    return snapshot.load(opening.state) if opening.state else Scheduler(opening.epoch, opening.settings)


def run(reader: Reader, observe: Observer | None = None) -> Replayed:
    """Run a journal's events; ``observe`` sees each one. Raises Divergence, with the number of the event."""
    replayed = Replayed(begin(reader.opening))
    for number, handled in enumerate(reader):
        replayed.events[type(handled.event).__name__] += 1
        replayed.first_ms = handled.now_ms if replayed.first_ms is None else replayed.first_ms
        replayed.last_ms = handled.now_ms
        if not handled.digest:
            replayed.crash = _crash(replayed.scheduler, handled, number)
            break
        actions = replayed.scheduler.handle(handled.event, handled.now_ms)
        if digest(actions) != handled.digest:
            raise Divergence(
                f"event {number} ({type(handled.event).__name__}) has other actions than when it was written "
                "(by another version of the scheduler, or there is a bug)"
            )
        if observe is not None:
            observe(replayed.scheduler, handled.event, handled.now_ms, actions)
    return replayed


def _crash(scheduler: Scheduler, handled: Handled, number: int) -> str:
    """Let the core fail as it did."""
    try:
        scheduler.handle(handled.event, handled.now_ms)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise Divergence(
        f"event {number} ({type(handled.event).__name__}) made the core fail when it was written, and no more"
    )


class Stories:
    """What happened to one answer, or one choice of it: its own story and the tokens it was sent."""

    def __init__(self, request_id: str) -> None:
        self._id = request_id
        self._ids: set[str] | None = None
        """Of the requests of this answer so far: gateways number the choices, ``ID-0``, ``ID-1``."""
        self._found: dict[tuple[str, str], Request] = {}
        self._sent: list[str] = []

    def observe(self, scheduler: Scheduler, event: Event, now_ms: int, actions: list[Action]) -> None:
        """See one event."""
        ledger = scheduler.ledger.requests
        if self._ids is None:  # what the file opens with
            self._ids = {name for requests in ledger.values() for name in requests if self._is_of_answer(name)}
        if isinstance(event, Submitted) and self._is_of_answer(event.submit.request_id):
            self._ids.add(event.submit.request_id)
            self._sent.append(f"  {now_ms} ms: {event.submit.request_id} submitted by {event.gateway}")
        for gateway, requests in ledger.items():
            self._found |= {(gateway, name): requests[name] for name in self._ids if name in requests}
        for action in actions:
            if isinstance(action, ToGateway) and isinstance(action.message, Tokens):
                for delta in action.message.items:
                    if delta.request_id in self._ids:
                        end = f", finish {delta.finish}" if delta.finish else ""
                        self._sent.append(f"  {now_ms} ms: {tokens.count(delta.token_ids)} tokens{end}")
            elif isinstance(action, ToGateway) and getattr(action.message, "request_id", None) in self._ids:
                self._sent.append(f"  {now_ms} ms: {type(action.message).__name__}")

    def _is_of_answer(self, request_id: str) -> bool:
        return request_id == self._id or request_id.startswith(f"{self._id}-")

    def lines(self) -> Iterator[str]:
        """The story; nothing when the request never appeared."""
        for request in self._found.values():
            yield request.tell()
        if self._sent:
            yield "messages:"
            yield from self._sent


@dataclass(frozen=True)
class ReplayOptions:
    """What to show of which journal."""

    file: Path
    request: str
    """Id of the request whose story is wanted; empty is none."""
    picture: str
    """HTML file to write; empty is none."""
    steps: int
    """Steps of each executor in the picture."""


def main(options: ReplayOptions) -> int:
    """Replay and print; 0, or 1 when the file cannot be read or its actions differ."""
    recorder, stories = Recorder(most_steps=options.steps), Stories(options.request)

    def observe(scheduler: Scheduler, event: Event, now_ms: int, actions: list[Action]) -> None:
        recorder.observe(scheduler, actions)
        if options.request:
            stories.observe(scheduler, event, now_ms, actions)

    try:
        reader = Reader(options.file)
        replayed = run(reader, observe)
    except (OSError, JournalError, snapshot.SnapshotError, Divergence) as error:
        print(f"paternoster: error: {told(error)}", file=sys.stderr)
        return 1
    _print_summary(options.file, reader, replayed, recorder)
    for rows in recorder.executors.values():
        print(f"{rows.executor}: {text.LEGEND}")
        print(*text.draw(rows), sep="\n")
    if options.request:
        print(*(list(stories.lines()) or [f"no request {options.request} in this file"]), sep="\n")
    if options.picture:
        panels = [Panel(rows.executor, "", [rows]) for rows in recorder.executors.values()]
        Path(options.picture).write_text(page(f"Lanes by steps: {options.file.name}", panels))
    return 0


def _print_summary(file: Path, reader: Reader, replayed: Replayed, recorder: Recorder) -> None:
    counters = replayed.scheduler.counters
    seconds = (replayed.last_ms - (replayed.first_ms or 0)) / 1000
    title = f"{file.name}: {replayed.events.total()} events in {seconds:.1f} s, every action the same"
    table = Table(title=title, show_header=False)
    table.add_row("events", ", ".join(f"{name} {count}" for name, count in replayed.events.most_common()))
    table.add_row("requests", f"{counters.submitted} submitted, {counters.accepted} accepted")
    table.add_row("ended", ", ".join(f"{name} {count}" for name, count in counters.ended.items()) or "none")
    table.add_row("steps", f"{counters.steps}, and {counters.failed_steps} failed")
    table.add_row("tokens", f"{counters.output_tokens} out, {counters.computed_tokens} computed")
    table.add_row("preempted, lost", f"{counters.preempted}, {counters.lost}")
    share = recorder.busy.share
    table.add_row("busy share while queueing", "-" if share is None else f"{share:.3f}")
    left = replayed.scheduler.ledger
    table.add_row("at the end", f"{left.num_running} running, {left.num_waiting} waiting")
    if reader.opening.redacted:
        table.add_row("tokens are", "redacted")
    if reader.damage:
        table.add_row("the file ends early", reader.damage)
    if replayed.crash:
        table.add_row("the core failed, again", replayed.crash)
    Console().print(table)

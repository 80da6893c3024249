"""Who comes when, with what: seeded arrivals. Token ids are made up so that only what shares a prefix begins alike.

Called by ``engine`` and ``command``; pure.
"""

import csv
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from shared.wire import tokens
from tools.bench.workload import Lengths, lengths_of

EOS = 1
FILLER = 0
"""Every token of a prompt but its first, and every sampled token."""
FIRST_ID = 2
VOCAB_SIZE = 2**31 - 1
GROUP_IDS = 2**30
"""First tokens from here on open a shared prefix; those below are each one request's own."""


class Arrival(NamedTuple):
    """One request, at a time of the simulation."""

    at_us: int
    prompt: bytes
    """Column of token ids."""
    num_output: int
    """Tokens after which it ends by itself."""
    tenant: str = ""
    priority: int = 0
    session: int = -1
    """A conversation that may go on after this answer."""


class Workload(Protocol):
    """A source of arrivals."""

    def arrivals(self) -> Iterator[Arrival]:
        """Those that come by themselves, in order of time."""

    def after(self, ended: Arrival, now_us: int, answered: bool) -> Arrival | None:
        """The one that comes because ``ended`` has just got its whole answer, or will get none, if any does."""


class Numbers:
    """Prompts of given lengths, no two alike but for the prefix of their group."""

    def __init__(self) -> None:
        self._next_id = FIRST_ID
        self._groups: dict[str, int] = {}

    def prompt(self, num_tokens: int, group: str = "", num_prefix: int = 0) -> bytes:
        """A prompt; the first ``num_prefix`` tokens are those of ``group``."""
        num_prefix = min(num_prefix, num_tokens - 1)
        if not group or num_prefix < 1:
            return self._own(num_tokens)
        first = GROUP_IDS + self._groups.setdefault(group, len(self._groups))
        return tokens.pack([first]) + bytes(4 * (num_prefix - 1)) + self._own(num_tokens - num_prefix)

    def _own(self, num_tokens: int) -> bytes:
        self._next_id += 1
        return tokens.pack([self._next_id]) + bytes(4 * (num_tokens - 1))


class Independent:
    """Requests that know nothing of each other, at times that ``times`` gives in seconds."""

    def __init__(
        self, times: Iterator[float], prompts: Lengths, outputs: Lengths, seed: int, num_requests: int
    ) -> None:
        self._times = times
        self._lengths = islice(lengths_of(seed, prompts, outputs), num_requests)

    def arrivals(self) -> Iterator[Arrival]:
        """All of them."""
        numbers = Numbers()
        for (num_prompt, num_output), at_s in zip(self._lengths, self._times, strict=False):
            yield Arrival(round(at_s * 1e6), numbers.prompt(num_prompt), num_output)

    def after(self, ended: Arrival, now_us: int, answered: bool) -> Arrival | None:
        """Nobody."""
        return None


class Closed:
    """Clients that each send their next request ``client_us`` after the scheduler has ended the one before."""

    def __init__(
        self, concurrency: int, client_us: int, prompts: Lengths, outputs: Lengths, seed: int, num_requests: int
    ) -> None:
        self._concurrency = concurrency
        self._client_us = client_us
        self._numbers = Numbers()
        self._lengths = islice(lengths_of(seed, prompts, outputs), num_requests)

    def arrivals(self) -> Iterator[Arrival]:
        """Everybody's first."""
        for num_prompt, num_output in islice(self._lengths, self._concurrency):
            yield Arrival(0, self._numbers.prompt(num_prompt), num_output)

    def after(self, ended: Arrival, now_us: int, answered: bool) -> Arrival | None:
        """The same client's next, while there are any; to be refused is an answer, too."""
        for num_prompt, num_output in self._lengths:
            return Arrival(now_us + self._client_us, self._numbers.prompt(num_prompt), num_output)
        return None


def at_once() -> Iterator[float]:
    """Everybody at the beginning."""
    while True:
        yield 0.0


def bursts(size: int, every_s: float) -> Iterator[float]:
    """``size`` at once, every so many seconds."""
    at_s = 0.0
    while True:
        for _ in range(size):
            yield at_s
        at_s += every_s


class Sessions:
    """Conversations: each turn's prompt is all that was said before and the user's next words.

    They begin at ``times``; between an answer's end and the next turn a person reads and types for an exponentially
    distributed time with mean ``think_s``.
    """

    def __init__(
        self,
        times: Iterator[float],
        num_sessions: int,
        turns: Lengths,
        think_s: float,
        words: Lengths,
        outputs: Lengths,
        seed: int,
        context_len: int,
    ) -> None:
        self._times = times
        self._num_sessions = num_sessions
        self._turns = turns
        self._think_s = think_s
        self._words = words
        self._outputs = outputs
        self._chance = random.Random(f"sessions {seed}")
        self._context_len = context_len
        self._left: list[int] = []

    def arrivals(self) -> Iterator[Arrival]:
        """First turns."""
        numbers = Numbers()
        for session, at_s in zip(range(self._num_sessions), self._times, strict=False):
            self._left.append(self._turns.draw(self._chance) - 1)
            prompt = numbers.prompt(self._words.draw(self._chance))
            yield Arrival(round(at_s * 1e6), prompt, self._outputs.draw(self._chance), session=session)

    def after(self, ended: Arrival, now_us: int, answered: bool) -> Arrival | None:
        """The next turn, while there is one and the context holds it; nobody goes on without an answer."""
        if not answered or not self._left[ended.session]:
            return None
        self._left[ended.session] -= 1
        said = ended.prompt + bytes(4 * ended.num_output)
        prompt = said + bytes(4 * self._words.draw(self._chance))
        num_output = self._outputs.draw(self._chance)
        if tokens.count(prompt) + num_output > self._context_len:
            return None
        at_us = now_us + round(1e6 * self._chance.expovariate(1 / self._think_s)) if self._think_s else now_us
        return Arrival(at_us, prompt, num_output, session=ended.session)


COLUMNS = ("arrival", "prompt_tokens", "output_tokens", "prefix_group", "prefix_tokens", "tenant", "priority")
"""Of a trace file; the first three are required. ``arrival`` is seconds."""


class TraceError(ValueError):
    """The trace file cannot be used; the message names the line."""


class Trace:
    """Arrivals from a CSV file with a heading line that names its columns."""

    def __init__(self, path: Path, num_requests: int | None) -> None:
        """Raises OSError and TraceError."""
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            missing = [name for name in COLUMNS[:3] if name not in (rows.fieldnames or ())]
            if missing:
                raise TraceError(f"{path} has no column {missing[0]}; its heading line must name {', '.join(COLUMNS)}")
            numbers = Numbers()
            read = [_read(row, number, path, numbers.prompt) for number, row in enumerate(rows, start=2)]
        self._arrivals = sorted(read, key=lambda arrival: arrival.at_us)[:num_requests]

    def arrivals(self) -> Iterator[Arrival]:
        """All of them."""
        return iter(self._arrivals)

    def after(self, ended: Arrival, now_us: int, answered: bool) -> Arrival | None:
        """Nobody."""
        return None


def _read(row: dict[str, str], line: int, path: Path, prompt: Callable[[int, str, int], bytes]) -> Arrival:
    try:
        at_us = round(float(row["arrival"]) * 1e6)
        num_prompt, num_output = int(row["prompt_tokens"]), int(row["output_tokens"])
        group = row.get("prefix_group") or ""
        # A group without a length shares half of each prompt.
        num_prefix = int(row.get("prefix_tokens") or num_prompt // 2)
        priority = int(row.get("priority") or 0)
    except (ValueError, TypeError) as error:
        raise TraceError(f"{path} line {line}: {error}") from error
    if at_us < 0 or num_prompt < 1 or num_output < 1:
        raise TraceError(f"{path} line {line}: times begin at 0 and lengths at 1")
    return Arrival(at_us, prompt(num_prompt, group, num_prefix), num_output, row.get("tenant") or "", priority)

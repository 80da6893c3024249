"""One choice without a scheduler: text, counts and the end, however the tokens are grouped."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.choice import Choice, Update, join, merged
from services.gateway.streams import Streams
from services.gateway.text.detokenizer import detokenizer
from services.gateway.text.fake_tokenizer import fake_tokenizer
from services.gateway.text.stops import StopFinder
from shared.wire import tokens
from shared.wire.gateway import Cancel, Delta, Submit, Tokens, Usage
from shared.wire.sampling import Sampling

TOKENIZER = fake_tokenizer()


class Sink:
    """Keeps what a choice tells."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.errors: list[str] = []
        self.num_accepted = 0

    def accepted(self) -> None:
        self.num_accepted += 1

    def updated(self, choice: Choice, update: Update) -> None:
        self.updates.append(update)

    def rejected(self, rejected: Any) -> None:
        self.errors.append(rejected.code)

    def failed(self, reason: str, *, unavailable: bool) -> None:
        self.errors.append(reason)


class Bench:
    """A choice in front of streams that send nowhere."""

    def __init__(self, stops: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self.sent: list[Any] = []
        self.streams = Streams()
        self.streams.send = self._send
        self.sink = Sink()
        submit = Submit("r-0", tokens.pack([1]), Sampling(min_tokens=min_tokens), max_tokens=100)
        self.choice = Choice(0, detokenizer(TOKENIZER, [1], skip_special_tokens=True), StopFinder(stops), submit)
        self.choice.open(self.streams, self.sink)

    def _send(self, message: Any) -> bool:
        self.sent.append(message)
        return True

    def get(self, ids: list[int], finish: Any = None, **fields: Any) -> None:
        cached = fields.pop("cached", 0)
        usage = Usage(1, 1, cached) if finish or cached else None
        self.streams.tokens(Tokens([Delta("r-0", tokens.pack(ids), finish, usage, **fields)]))

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.sink.updates)


@given(text=st.text(max_size=20), cuts=st.lists(st.integers(1, 4), max_size=40))
def test_text_does_not_depend_on_how_tokens_are_grouped(text: str, cuts: list[int]) -> None:
    bench = Bench(stops=("never there",))
    ids = [*text.encode()]
    for cut, size in enumerate(cuts):
        bench.get(ids[:size], cached=0 if cut else 3)
        del ids[:size]
    bench.get(ids, "length", cached=0 if cuts and text else 3)
    assert bench.text == text
    assert bench.sink.updates[-1].finish == "length"
    assert bench.choice.num_tokens == len(text.encode())
    assert bench.choice.num_cached == 3
    assert len(bench.streams) == 0


@pytest.mark.parametrize("size", [1, 2, 5, 20])
def test_a_stop_string_ends_it_and_nothing_behind_counts(size: int) -> None:
    bench = Bench(stops=("two",))
    ids = [*b"one two three four "]
    while ids:
        bench.get(ids[:size])
        del ids[:size]
    assert bench.text == "one "
    assert bench.choice.num_tokens == len("one two")
    assert sum(len(update.token_ids) for update in bench.sink.updates) == len("one two")
    assert bench.choice.finish == "stop"
    assert [type(message) for message in bench.sent] == [Submit, Cancel]


def test_a_stop_string_in_the_last_delta_is_a_stop() -> None:
    bench = Bench(stops=("b",))
    bench.get([*b"abc"], "length")
    assert (bench.text, bench.choice.finish, bench.choice.num_tokens) == ("a", "stop", 2)
    assert [type(message) for message in bench.sent] == [Submit]


def test_a_stop_token_counts_and_has_no_text() -> None:
    bench = Bench()
    bench.get([65, 66], "stop", stop_token_id=66)
    assert (bench.text, bench.choice.num_tokens, bench.choice.finish) == ("A", 2, "stop")
    assert bench.sink.updates[-1].token_ids == [65, 66]


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    bench = Bench(stops=("b",), min_tokens=3)
    bench.get([*b"abab"])
    assert (bench.text, bench.choice.finish, bench.choice.num_tokens) == ("aba", "stop", 4)


@pytest.mark.parametrize(("finish", "told"), [("error", "NaN"), ("cancelled", "the request was cancelled")])
def test_failures_are_errors_and_never_a_finish(finish: str, told: str) -> None:
    bench = Bench()
    bench.get([65], finish, error="NaN" if finish == "error" else "")
    assert bench.sink.errors == [told]
    assert bench.text == "A"
    assert bench.choice.finish is None


def test_closing_twice_cancels_once_and_late_tokens_are_dropped() -> None:
    bench = Bench()
    bench.get([65])
    bench.choice.close("gone")
    bench.choice.close("gone")
    bench.get([66])
    assert bench.text == "A"
    assert [type(message) for message in bench.sent] == [Submit, Cancel]
    assert bench.streams.num_unknown == 1


def test_updates_of_a_slow_client_are_put_together() -> None:
    updates = [Update(1, "a", [1], 1, None), Update(0, "x", [2], 1, None), Update(1, "b", [3], 2, "stop")]
    assert merged(updates) == [Update(1, "ab", [1, 3], 2, "stop"), Update(0, "x", [2], 1, None)]
    assert join(updates[:1]) == updates[0]


def test_cached_tokens_are_known_when_a_stop_string_ends_it() -> None:
    bench = Bench(stops=("lo",))
    bench.get([*b"hel"], cached=16)
    bench.get([*b"lo wor"])
    assert bench.text == "hel"
    assert bench.choice.num_cached == 16


def test_what_a_later_scheduler_finds_in_its_cache_does_not_count() -> None:
    bench = Bench()
    bench.get([*b"hel"])
    bench.get([*b"lo"], cached=16)
    bench.get([], "length", cached=16)
    assert bench.choice.num_cached == 0

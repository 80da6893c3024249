"""T2: output is the longest prefix before the first completed stop string, however the text is cut."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.stops import StopFinder

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str], unarmed: int = 0) -> tuple[str, bool, list[str]]:
    finder = StopFinder(stops)
    sent = []
    for index, piece in enumerate(pieces):
        sent.append(finder.push(piece, armed=index >= unarmed))
        if finder.stopped:
            return "".join(sent), True, sent
    return "".join(sent) + finder.flush(), False, sent


def oracle(text: str, stops: list[str], dead: int = 0) -> str:
    """The definition, character by character; completions within the first ``dead`` characters do not count."""
    for end in range(dead + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_output_is_the_prefix_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    text, _, _ = run(stops, pieces)
    assert text == oracle("".join(pieces), stops)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS, unarmed=st.integers(0, 8))
def test_a_stop_completed_before_the_minimum_does_not_count(pieces: list[str], stops: list[str], unarmed: int) -> None:
    text, _, _ = run(stops, pieces, unarmed)
    assert text == oracle("".join(pieces), stops, dead=len("".join(pieces[:unarmed])))


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_only_what_may_become_a_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    finder = StopFinder(stops)
    whole, sent = "", ""
    for piece in pieces:
        whole += piece
        sent += finder.push(piece)
        if finder.stopped:
            return
        held = whole[len(sent) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_stream_01_stop_string_hold_back() -> None:
    text, stopped, sent = run(["brown fox"], ["the ", "bro", "wn", " fo", "x jumps"])
    assert (text, stopped) == ("the ", True)
    assert sent == ["the ", "", "", "", ""]


def test_stream_02_tail_is_flushed_when_the_stop_never_completes() -> None:
    text, stopped, _ = run(["end\u0001", "never-there-zzz"], ["this is", " the ", "en", "d"])
    assert (text, stopped) == ("this is the end", False)


def test_no_stops_pass_everything_at_once() -> None:
    finder = StopFinder([])
    assert finder.push("abc") == "abc"
    assert finder.flush() == ""


@given(pieces=st.lists(st.text("ab", max_size=3), max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=3)))
def test_the_text_may_end_with_what_stopped_it(pieces: list[str], stops: list[str]) -> None:
    without, included = StopFinder(stops), StopFinder(stops, included=True)
    texts = ["", ""]
    for piece in pieces:
        if not without.stopped:
            texts = [text + finder.push(piece) for text, finder in zip(texts, (without, included), strict=True)]
    assert without.stopped_by == included.stopped_by
    assert texts[1] == texts[0] + (without.stopped_by or "")

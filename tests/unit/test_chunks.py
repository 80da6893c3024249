"""T3: whatever the text, every event parses back to it, on one line, with the right choice."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.errors import internal
from services.gateway.choice import Update
from services.gateway.logprobs import TokenLogprobs
from services.gateway.shapes.chunks import ChatChunks, Chunks, CompletionChunks
from services.gateway.shapes.shape import KEEP_ALIVE
from tests.fakes.answers import outline
from tests.fakes.gateway_world import events_of, text_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)


def chunks(kind: type[Chunks], **fields: Any) -> Chunks:
    return kind(outline(**fields))


@pytest.mark.parametrize("kind", [ChatChunks, CompletionChunks])
@given(pieces=st.lists(st.tuples(st.integers(0, 2), TEXT), max_size=10), flags=st.tuples(*[st.booleans()] * 3))
def test_frames_parse_back(kind: type[Chunks], pieces: list[tuple[int, str]], flags: tuple[bool, ...]) -> None:
    names = ("include_usage", "continuous_usage", "return_token_ids")
    state = chunks(kind, n=3, **dict(zip(names, flags, strict=True)))
    body = b""
    for choice, text in pieces:
        body += state.events([Update(choice, text, [1], 1, None)])
    body += state.events([Update(choice, "", [], 1, "stop") for choice in range(3)])
    body += state.ending()
    parsed = events_of(body)
    assert parsed.count("[DONE]") == 1
    assert parsed[-1] == "[DONE]"
    for choice in range(3):
        assert text_of(parsed, choice) == "".join(text for index, text in pieces if index == choice)
    if flags[2]:
        ids = [part.get("token_ids", []) for event in parsed[:-1] for part in event["choices"]]
        assert sum(map(len, ids)) == len(pieces)
    assert (parsed[-2]["choices"] == []) == flags[0]


def test_no_chunk_for_held_text_but_its_ids_come_with_the_next() -> None:
    state = chunks(CompletionChunks, return_token_ids=True)
    state.events([Update(0, "a", [1], 1, None)])
    assert state.events([Update(0, "", [2], 2, None)]) == b""
    parsed = events_of(state.events([Update(0, "b", [3], 3, None)]))
    assert parsed[0]["choices"][0]["token_ids"] == [2, 3]


@pytest.mark.parametrize("kind", [ChatChunks, CompletionChunks])
def test_held_text_leaves_its_logprobs_for_the_chunk_that_lets_it_out(kind: type[Chunks]) -> None:
    state = chunks(kind, num_logprobs=0)
    body = state.events([Update(0, "a", [1], 1, None, [TokenLogprobs(1, 0, -1.0)])])
    body += state.events([Update(0, "", [2], 2, None, [TokenLogprobs(2, 1, -1.0)])])
    body += state.events([Update(0, "b", [3], 3, None, [TokenLogprobs(3, 1, -1.0)])])
    body += state.events([Update(0, "", [4], 4, "stop", [TokenLogprobs(4, 2, -1.0)])])
    told = [event["choices"][0]["logprobs"] for event in events_of(body)]
    tokens = [
        [one["token"] for one in part["content"]] if "content" in part else part["tokens"] for part in told if part
    ]
    assert tokens == [["1"], ["2", "3"], ["4"]]
    assert told[-1], "without text: on the last chunk"


def test_a_choice_of_a_chat_opens_with_its_role_even_when_it_ends_at_once() -> None:
    parsed: list[Any] = events_of(chunks(ChatChunks).events([Update(0, "", [5], 1, "stop")]))
    assert [event["choices"][0]["delta"] for event in parsed] == [{"role": "assistant", "content": ""}, {}]


def test_errors_and_signs_of_life() -> None:
    state = chunks(ChatChunks)
    assert events_of(state.failure(internal("broke")))[0]["error"]["message"] == "broke"
    assert events_of(KEEP_ALIVE + state.ending()) == ["[DONE]"]

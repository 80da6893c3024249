"""T3: whatever the text, every event parses back to it, on one line, with the right choice."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.errors import internal
from services.gateway.choice import Choice, Update
from services.gateway.logprobs import TokenLogprobs
from services.gateway.sse import DONE, KEEP_ALIVE, ChatEvents, CompletionEvents, Events, error_event
from services.gateway.usage import Usage
from tests.fakes.gateway_world import events_of, text_of

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)


def events(kind: type[Events], num_choices: int = 1, **options: Any) -> Events:
    prompts = [[1, 2]]
    no_choices: list[Choice] = []
    flags = {"with_usage": False, "with_usage_always": False, "with_token_ids": False, "logprobs": None, **options}
    return kind("id-1", 7, "m", Usage(prompts, no_choices, 1), prompts, n=num_choices, **flags)


@pytest.mark.parametrize("kind", [ChatEvents, CompletionEvents])
@given(pieces=st.lists(st.tuples(st.integers(0, 2), TEXT), max_size=10), flags=st.tuples(*[st.booleans()] * 3))
def test_frames_parse_back(kind: type[Events], pieces: list[tuple[int, str]], flags: tuple[bool, ...]) -> None:
    names = ("with_usage", "with_usage_always", "with_token_ids")
    state = events(kind, 3, **dict(zip(names, flags, strict=True)))
    body = b""
    for choice, text in pieces:
        body += state.chunks([Update(choice, text, [1], 1, None)])
    body += state.chunks([Update(choice, "", [], 1, "stop") for choice in range(3)])
    body += state.usage_chunk() + DONE
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
    state = events(CompletionEvents, with_token_ids=True)
    state.chunks([Update(0, "a", [1], 1, None)])
    assert state.chunks([Update(0, "", [2], 2, None)]) == b""
    parsed = events_of(state.chunks([Update(0, "b", [3], 3, None)]))
    assert parsed[0]["choices"][0]["token_ids"] == [2, 3]


@pytest.mark.parametrize("kind", [ChatEvents, CompletionEvents])
def test_held_text_leaves_its_logprobs_for_the_chunk_that_lets_it_out(kind: type[Events]) -> None:
    state = events(kind, logprobs=lambda told: {"ids": [one.token_id for one in told]})
    body = state.chunks([Update(0, "a", [1], 1, None, [TokenLogprobs(1, 0, -1.0)])])
    body += state.chunks([Update(0, "", [2], 2, None, [TokenLogprobs(2, 1, -1.0)])])
    body += state.chunks([Update(0, "b", [3], 3, None, [TokenLogprobs(3, 1, -1.0)])])
    body += state.chunks([Update(0, "", [4], 4, "stop", [TokenLogprobs(4, 2, -1.0)])])
    told = [event["choices"][0]["logprobs"] for event in events_of(body)]
    assert [one["ids"] for one in told if one] == [[1], [2, 3], [4]]
    assert told[-1] == {"ids": [4]}, "without text: on the last chunk"


def test_a_choice_of_a_chat_opens_with_its_role_even_when_it_ends_at_once() -> None:
    parsed: list[Any] = events_of(events(ChatEvents).chunks([Update(0, "", [5], 1, "stop")]))
    assert [event["choices"][0]["delta"] for event in parsed] == [{"role": "assistant", "content": ""}, {}]


def test_errors_and_signs_of_life() -> None:
    assert events_of(error_event(internal("broke").body()) + DONE)[0]["error"]["message"] == "broke"
    assert events_of(KEEP_ALIVE + DONE) == ["[DONE]"]

"""Logprobs in the gateway: records read, prompts put together from pieces, tokens spelled, both endpoints' shapes."""

import json
import math

import pytest

from services.gateway.logprobs import (
    PromptRecords,
    TokenLogprobs,
    chat_shape,
    completion_shape,
    read_records,
    token_text,
)
from services.gateway.text.echo import echo_of
from services.gateway.text.fake_tokenizer import fake_tokenizer
from shared import fake_model
from shared.wire import tokens
from tests.fakes.scripted_scheduler import record

TOKENIZER = fake_tokenizer()


@pytest.mark.parametrize("num_logprobs", [0, 1, 20])
def test_records_are_read_one_by_one(num_logprobs: int) -> None:
    read = read_records(record(5, num_logprobs, 0) + record(7, num_logprobs, 1), num_logprobs)
    assert [one.logprob for one in read] == [-0.5, -1.0]
    assert [list(one.top_ids) for one in read] == [
        [5 + i for i in range(num_logprobs)],
        [6 + i for i in range(num_logprobs)],
    ]
    assert list(read[1].top_logprobs) == [-0.5 * (i + 1) for i in range(num_logprobs)]


def test_a_cut_record_is_refused() -> None:
    with pytest.raises(ValueError, match="no records"):
        read_records(record(5, 2, 0)[:-4], 2)


def test_a_prompt_in_pieces_some_of_them_twice() -> None:
    prompt = [10, 11, 12, 13, 14]
    column = b"".join(record(token_id, 1, 0) for token_id in prompt[1:])
    size = len(column) // 4
    records = PromptRecords(5, 1)
    records.add(1, column[: 2 * size])
    records.add(1, column[:size])  # from the start again, as after a preemption
    assert not records.complete
    with pytest.raises(ValueError, match="do not follow"):
        records.add(4, column[3 * size :])
    records.add(2, column[size:])
    assert records.complete
    told = records.read(prompt, [0, 1, 2, 3, 4])
    assert [(one.token_id, one.offset, one.logprob) for one in told] == [
        (10, 0, None),
        *((token_id, offset, -0.5) for offset, token_id in enumerate(prompt[1:], 1)),
    ]


def test_a_prompt_of_one_token_has_nothing_to_wait_for() -> None:
    assert PromptRecords(1, 5).complete


def test_parts_of_characters_are_spelled_byte_by_byte() -> None:
    assert token_text("é".encode()) == "é"
    assert token_text(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
    assert token_text(b"") == ""


def test_chat_shape_has_the_tokens_own_bytes() -> None:
    shape = chat_shape([TokenLogprobs(0xC3, 0, -1.5, [0xC3, 65], [-1.5, -2.0])], TOKENIZER.spelled)
    assert shape == {
        "content": [
            {
                "token": "bytes:\\xc3",
                "logprob": -1.5,
                "bytes": [0xC3],
                "top_logprobs": [
                    {"token": "bytes:\\xc3", "logprob": -1.5, "bytes": [0xC3]},
                    {"token": "A", "logprob": -2.0, "bytes": [65]},
                ],
            }
        ],
        "refusal": None,
    }


def test_completion_shape_has_the_chosen_token_among_the_top() -> None:
    told = [TokenLogprobs(65, 0, None), TokenLogprobs(66, 1, -3.0, [67], [-0.5])]
    shape = completion_shape(told, TOKENIZER.spelled)
    assert shape == {
        "text_offset": [0, 1],
        "token_logprobs": [None, -3.0],
        "tokens": ["A", "B"],
        "top_logprobs": [None, {"C": -0.5, "B": -3.0}],
    }
    assert json.loads(json.dumps(shape, allow_nan=False)) == shape
    assert math.isfinite(tokens.unpack_floats(tokens.pack_floats([-9999.0]))[0])


def test_an_echo_knows_where_each_token_begins() -> None:
    text = "aé🙂b"
    ids = [*text.encode(), fake_model.IM_END, 300]
    echo = echo_of(TOKENIZER, ids, skip_special_tokens=True)
    assert echo.text == TOKENIZER.decode(ids, skip_special_tokens=True)
    assert echo.offsets == [0, 1, 1, 2, 2, 2, 2, 3, 4, 4]
    with_special = echo_of(TOKENIZER, ids, skip_special_tokens=False)
    assert with_special.text.startswith(text + "<|im_end|>")
    assert echo_of(TOKENIZER, [0xC3], skip_special_tokens=True).text == "\ufffd"

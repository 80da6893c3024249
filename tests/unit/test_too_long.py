"""A text that must be too long is refused by its length: to tokenize megabytes takes a thread for many seconds."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.fake_tokenizer import fake_tokenizer
from services.gateway.text.tokenizer import TooLong, _most_chars

TOKENIZER = fake_tokenizer()


@given(st.text(max_size=200) | st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", " ", "a"])).map("".join))
def test_no_token_stands_for_more_characters(text: str) -> None:
    num_tokens = len(TOKENIZER.encode(text, add_special_tokens=False))
    assert len(text) <= num_tokens * TOKENIZER.most_chars


def test_what_must_be_too_long_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "_backend", None)
    with pytest.raises(TooLong) as caught:
        TOKENIZER.encode("a" * 8_000_000, add_special_tokens=True, max_tokens=8192)
    assert caught.value.num_tokens == f"at least {-(-8_000_000 // TOKENIZER.most_chars)}"


def test_what_may_fit_is_counted() -> None:
    with pytest.raises(TooLong) as caught:
        TOKENIZER.encode("a" * 10, add_special_tokens=False, max_tokens=9)
    assert caught.value.num_tokens == "10"


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({}, 5),
        ({"normalizer": {"type": "NFC"}}, 20),
        ({"normalizer": {"type": "Strip"}}, 0),
        ({"added_tokens": [{"lstrip": True, "rstrip": False}]}, 0),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Removed"}]}}, 0),
    ],
)
def test_nothing_is_known_where_characters_may_vanish(changes: dict[str, Any], most: int) -> None:
    plain: dict[str, Any] = {"normalizer": None, "added_tokens": [], "pre_tokenizer": {"type": "ByteLevel"}}
    assert _most_chars(json.loads(json.dumps(plain | changes)), [b"a", b"hello"]) == most
    assert _most_chars(plain | changes, []) == 0, "nor of a tokenizer that is not byte-level"

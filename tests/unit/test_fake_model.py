"""The made-up vocabulary: a tokenizer can be built from it, and it never changes from one process to the next."""

import hashlib

import pytest

from shared import fake_model


def test_raw_bytes_encode_any_text() -> None:
    assert [fake_model.token_bytes(value) for value in range(256)] == [bytes([value]) for value in range(256)]


def test_words_are_distinct_and_start_with_a_space() -> None:
    words = [fake_model.token_bytes(value) for value in range(fake_model.FIRST_WORD, fake_model.FIRST_SPECIAL)]
    assert len(set(words)) == len(words)
    assert all(word.startswith(b" ") and len(word) > 3 and word.decode().strip() for word in words)
    assert any("🙂".encode() in word for word in words)


def test_specials_close_the_vocabulary() -> None:
    assert fake_model.token_bytes(fake_model.IM_END) == b"<|im_end|>"
    assert fake_model.END_OF_TEXT == fake_model.VOCAB_SIZE - 1
    assert fake_model.EOS_TOKEN_IDS == [fake_model.IM_END, fake_model.END_OF_TEXT]


@pytest.mark.parametrize("token_id", [-1, fake_model.VOCAB_SIZE])
def test_no_token_outside_the_vocabulary(token_id: int) -> None:
    with pytest.raises(IndexError):
        fake_model.token_bytes(token_id)


def test_the_vocabulary_is_pinned() -> None:
    """Texts of the fake model are compared across processes and releases."""
    whole = b"\0".join(fake_model.token_bytes(value) for value in range(fake_model.VOCAB_SIZE))
    assert hashlib.sha256(whole).hexdigest() == "2703a1cd66bea6f3431fbdcaa542bc21c2fc7ca75f1f85a0b70db9a07d5709de"


def test_facts() -> None:
    facts = fake_model.facts(100)
    assert (facts.vocab_size, facts.context_len, facts.tokenizer_digest) == (1024, 100, "fake")

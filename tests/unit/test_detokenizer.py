"""T1: whatever the ids, the pieces joined are the decode of all of them, and no half character leaves."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from services.gateway.text.detokenizer import Detokenizer, detokenizer
from services.gateway.text.fake_tokenizer import fake_tokenizer
from services.gateway.text.tokenizer import Tokenizer, byte_level_alphabet

TEXT = "😀👩‍👩‍👧 漢字 ไทย ď. Hello, world; the  spaces\n\tand the words, tokens and bytes."


def byte_level() -> Tokenizer:
    """A trained byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM have."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<a b>"], initial_alphabet=byte_level_alphabet()
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"), "byte")


def byte_fallback() -> Tokenizer:
    """A sentencepiece-like vocabulary with byte fallback, as Llama 2 and Mistral have."""
    pieces = ["<unk>", "<s>", "</s>", *[f"<0x{value:02X}>" for value in range(256)], *"▁abcdefgdhilnorstuvwy,.;漢"]
    words = ["▁the", "▁word", "s", "▁Hello", "▁world", "▁and", "▁to", "ken", "▁", "▁▁"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces + words))}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>"), "fallback")


BYTE_LEVEL = {"fake": fake_tokenizer(), "byte_level": byte_level()}
FALLBACK = byte_fallback()


def joined(state: Detokenizer, ids: list[int]) -> str:
    return "".join(state.decode(token_id) for token_id in ids) + state.flush()


@pytest.mark.parametrize("name", BYTE_LEVEL)
@given(data=st.data(), skip=st.booleans())
def test_pieces_joined_are_the_whole_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = BYTE_LEVEL[name]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer.token_bytes) - 1), max_size=30))
    pieces = joined(detokenizer(tokenizer, [1], skip_special_tokens=skip), ids)
    assert pieces == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
def test_no_half_character_leaves(text: str) -> None:
    tokenizer = BYTE_LEVEL["fake"]
    state = detokenizer(tokenizer, [], skip_special_tokens=True)
    sent = ""
    for value in text.encode():
        sent += state.decode(value)
        assert text.startswith(sent)
    assert sent + state.flush() == text


@given(data=st.data())
def test_windowed_pieces_are_the_whole_decode_after_the_prompt(data: st.DataObject) -> None:
    words = st.integers(3 + 256, FALLBACK._backend.get_vocab_size() - 1)
    special = st.sampled_from([1, 2])
    character = st.characters(exclude_categories=["Cs"]).map(lambda char: [3 + byte for byte in char.encode()])
    runs = data.draw(st.lists(words.map(lambda word: [word]) | character | special.map(lambda one: [one]), max_size=15))
    ids = [token_id for run in runs for token_id in run]
    prompt = data.draw(st.lists(words, min_size=1, max_size=8))
    skip = data.draw(st.booleans())
    context = prompt[-6:]
    whole = FALLBACK.decode(context + ids, skip_special_tokens=skip)
    before = FALLBACK.decode(context, skip_special_tokens=skip)
    assert before + joined(detokenizer(FALLBACK, prompt, skip_special_tokens=skip), ids) == whole


def test_broken_bytes_do_not_hold_the_text_back_for_ever() -> None:
    state = detokenizer(FALLBACK, [1], skip_special_tokens=True)
    text = "".join(state.decode(3 + 0xFF) for _ in range(200))
    assert len(text) > 150
    assert set(text) == {"\ufffd"}


@pytest.mark.parametrize("group", [1, 2, 3])
def test_stream_03_characters_spread_over_tokens(group: int) -> None:
    for tokenizer in [*BYTE_LEVEL.values(), FALLBACK]:
        ids = tokenizer.encode(TEXT, add_special_tokens=False)
        if tokenizer is FALLBACK:
            ids = [3 + value for value in TEXT.encode()]
        state = detokenizer(tokenizer, [1], skip_special_tokens=True)
        groups = [ids[start : start + group] for start in range(0, len(ids), group)]
        pieces = ["".join(map(state.decode, part)) for part in groups]
        assert "".join(pieces) + state.flush() == TEXT
        assert not any("\ufffd" in piece for piece in pieces)


def test_stream_04_first_token_keeps_its_space() -> None:
    word = next(index for index, spelled in enumerate(BYTE_LEVEL["fake"].token_bytes) if spelled == b" kareka")
    assert detokenizer(BYTE_LEVEL["fake"], [1], skip_special_tokens=True).decode(word) == " kareka"
    backend = FALLBACK._backend
    first, second = backend.token_to_id("▁Hello"), backend.token_to_id("▁world")
    assert detokenizer(FALLBACK, [first], skip_special_tokens=True).decode(second) == " world"


def test_ids_outside_the_vocabulary_have_no_text() -> None:
    state = detokenizer(BYTE_LEVEL["fake"], [1], skip_special_tokens=True)
    assert joined(state, [5000, 65, 70000]) == "A"


def test_cost_per_token_does_not_grow() -> None:
    """Counts the work instead of timing it: the window never grows past its bound."""
    state = detokenizer(FALLBACK, list(range(300, 310)), skip_special_tokens=True)
    source = random.Random(1)
    for _ in range(2000):
        state.decode(source.randrange(3, FALLBACK._backend.get_vocab_size()))
        assert len(state._window) <= 40


@given(ids=st.lists(st.integers(0, 300), max_size=20), data=st.data())
@pytest.mark.parametrize("tokenizer", [FALLBACK, BYTE_LEVEL["byte_level"]], ids=["fallback", "byte_level"])
def test_special_tokens_that_are_kept_have_text_and_the_others_none(
    tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    ids = [token_id for token_id in ids if tokenizer.spelled(token_id)]
    specials = sorted(tokenizer.special_ids)
    kept = frozenset(data.draw(st.lists(st.sampled_from(specials))))
    for special in specials:
        ids.insert(data.draw(st.integers(0, len(ids))), special)
    told = [token_id for token_id in ids if token_id not in tokenizer.special_ids - kept]
    pieces = joined(detokenizer(tokenizer, [5], skip_special_tokens=True, kept_ids=kept), ids)
    assert pieces == joined(detokenizer(tokenizer, [5], skip_special_tokens=False), told)
    assert all(pieces.count(tokenizer.spelled(special).decode()) >= 1 for special in kept)

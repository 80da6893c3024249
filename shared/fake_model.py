"""The vocabulary of the fake model: made-up text that needs no model files. No torch, no numpy.

The executor's fake backend draws its tokens from it; the gateway builds a tokenizer from it. Ids 0..255 are the raw
bytes, so that any text can be encoded; then come made-up words, each with its leading space; then the special tokens.
"""

from shared.wire.facts import ModelFacts

VOCAB_SIZE = 1024
CONTEXT_LEN = 8192
TOKENIZER_DIGEST = "fake"

FIRST_WORD = 256
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
FIRST_SPECIAL = VOCAB_SIZE - len(SPECIAL_TOKENS)
IM_START, IM_END, END_OF_TEXT = range(FIRST_SPECIAL, VOCAB_SIZE)
EOS_TOKEN_IDS = [IM_END, END_OF_TEXT]

_CONSONANTS = "klmnrstvp"
_VOWELS = "aeiou"
_ENDINGS = ["", "", "", "", "", "", "n", "s", "é", "ř", "ß", "🙂"]
"""Every twelfth word each ends in letters of 2 bytes and an emoji of 4."""
_SYLLABLES = [consonant + vowel for vowel in _VOWELS for consonant in _CONSONANTS]


def _word(number: int) -> str:
    """Two syllables tell words apart; a third one, in some, only varies their length."""
    high, low = divmod(number, len(_SYLLABLES))
    first = _SYLLABLES[(low * 7 + high) % len(_SYLLABLES)]
    second = _SYLLABLES[(high * 11 + low * 4) % len(_SYLLABLES)]
    third = "re" if number % 5 == 0 else ""
    return f" {first}{third}{second}{_ENDINGS[number % len(_ENDINGS)]}"


_BYTES = (
    [bytes([value]) for value in range(FIRST_WORD)]
    + [_word(number).encode() for number in range(FIRST_SPECIAL - FIRST_WORD)]
    + [text.encode() for text in SPECIAL_TOKENS]
)


def token_bytes(token_id: int) -> bytes:
    """Bytes of a token's text; a raw byte may be part of a character. Raises IndexError outside the vocabulary."""
    if token_id < 0:
        raise IndexError(f"token id {token_id} is negative")
    return _BYTES[token_id]


def facts(context_len: int = CONTEXT_LEN) -> ModelFacts:
    """What the fake model tells of itself."""
    return ModelFacts(
        model="fake",
        vocab_size=VOCAB_SIZE,
        context_len=context_len,
        eos_token_ids=EOS_TOKEN_IDS,
        tokenizer_digest=TOKENIZER_DIGEST,
    )

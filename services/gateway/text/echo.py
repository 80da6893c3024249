"""The prompt as the beginning of an answer's text (``echo``). Made in a thread by the completions endpoint; pure."""

from collections.abc import Sequence
from typing import NamedTuple

from services.gateway.text.detokenizer import detokenizer
from services.gateway.text.tokenizer import Tokenizer


class Echo(NamedTuple):
    """A prompt's text, and where in it each token begins."""

    prompt: Sequence[int]
    text: str
    offsets: list[int]
    """Characters before the one in which the token begins."""


def echo_of(tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> Echo:
    """Special tokens are left out of the text just as they are of the answer."""
    decoder = detokenizer(tokenizer, [], skip_special_tokens=skip_special_tokens)
    pieces, offsets, num_chars = [], [], 0
    for token_id in prompt:
        offsets.append(num_chars)
        pieces.append(decoder.decode(token_id))
        num_chars += len(pieces[-1])
    pieces.append(decoder.flush())
    return Echo(prompt, "".join(pieces), offsets)

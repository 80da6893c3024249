"""Token ids to text, one id at a time. Used by ``services.gateway.choice``; pure.

``decode(id)`` gives the text that is certain by now, ``flush()`` the rest. Never half a character: a replacement
character leaves only when it stands in the whole text too. Joined, the pieces equal the decode of all ids at once.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from services.gateway.text.tokenizer import Tokenizer

CONTEXT_IDS = 6
"""How many ids of the prompt the windowed detokenizer looks back on."""
MAX_HELD_IDS = 16
"""A character has at most 4 bytes, each at least part of an id; what is still broken after this many stays broken."""
REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The state of one text."""

    def decode(self, token_id: int) -> str:
        """The text this id makes certain; may be empty."""

    def flush(self) -> str:
        """What was held back; the text is complete."""


class ByteDetokenizer:
    """For byte-level vocabularies: the text is the bytes of the ids, read as UTF-8."""

    def __init__(self, token_bytes: Sequence[bytes], skipped_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def decode(self, token_id: int) -> str:
        """See ``Detokenizer``. An id outside the vocabulary (a padded one) has no text."""
        if token_id in self._skipped_ids or token_id >= len(self._token_bytes):
            return ""
        return self._utf8.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """See ``Detokenizer``."""
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: decodes a short window twice, without and with the newest id, and gives the difference.

    The window begins inside the prompt, so that the space before the first word is not trimmed: the pieces joined are
    what decoding (end of prompt + output) has more than decoding the end of the prompt. (The method of
    huggingface/text-generation-inference and vLLM.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skipped_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped_ids = skipped_ids
        self._window = [token_id for token_id in prompt[-CONTEXT_IDS:] if token_id not in skipped_ids]
        self._num_told = len(self._window)

    def decode(self, token_id: int) -> str:
        """See ``Detokenizer``."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        num_held = len(self._window) - self._num_told
        told, text = self._texts()
        if text == told and num_held == 1:
            self._window.pop()  # no text of its own: no use as context for the next one
            return ""
        if text.endswith(REPLACEMENT) and num_held < MAX_HELD_IDS:
            return ""
        del self._window[: self._num_told]
        self._num_told = len(self._window)
        return text[len(told) :]

    def flush(self) -> str:
        """See ``Detokenizer``."""
        told, text = self._texts()
        self._num_told = len(self._window)
        return text[len(told) :]

    def _texts(self) -> tuple[str, str]:
        told = self._tokenizer.decode(self._window[: self._num_told], skip_special_tokens=False)
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        return told, text


def detokenizer(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    *,
    skip_special_tokens: bool,
    kept_ids: frozenset[int] = frozenset(),
) -> Detokenizer:
    """The detokenizer that suits the tokenizer, at the start of an output. ``kept_ids`` have text whatever they are."""
    skipped_ids = tokenizer.special_ids - kept_ids if skip_special_tokens else frozenset()
    if tokenizer.is_byte_level:
        return ByteDetokenizer(tokenizer.token_bytes, skipped_ids)
    return WindowDetokenizer(tokenizer, prompt, skipped_ids)

"""The model's tokenizer as the gateway needs it: text to ids, ids to bytes, chats to prompts. Needs no torch.

Owned by ``services.gateway.gateway``; encoding and rendering are slow and are called in a thread. Imports transformers
for what a model folder means (special tokens, chat template) and tokenizers for the work itself.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from services.gateway.text.chat_template import ChatTemplate

WORD_START = "\u2581"
"""How vocabularies that are not byte-level write a space before a word."""


class TooLong(ValueError):
    """A text has more tokens than were allowed: ``num_tokens``, a number or the least that it can be, for people."""

    def __init__(self, num_tokens: int, *, at_least: bool = False) -> None:
        self.num_tokens = f"at least {num_tokens}" if at_least else str(num_tokens)
        super().__init__(f"{self.num_tokens} tokens")


class Tokenizer:
    """One loaded tokenizer. All methods may be called from several threads at once."""

    def __init__(self, model: Any, digest: str) -> None:
        """``model`` is transformers' fast tokenizer; ``digest`` must equal the executors' (see ``ModelFacts``)."""
        self._model = model
        self._backend: Backend = model.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.digest = digest
        described = json.loads(self._backend.to_str())
        self.is_byte_level = (described["decoder"] or {}).get("type") == "ByteLevel"
        """Whether every token stands for fixed bytes and a text is simply their concatenation."""
        self.token_bytes = _token_bytes(self._backend) if self.is_byte_level else []
        """Byte-level tokenizers: the bytes of each id, special tokens spelled out, none for an unused id."""
        self.most_chars = _most_chars(described, self.token_bytes)
        """Characters of a text that one token can stand for; 0 is not known."""
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids left out of a text when special tokens are skipped."""
        self._added_ids = {token.content: token_id for token_id, token in added.items()}
        self._chat_templates: dict[str, ChatTemplate] = {}

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read a model folder. Raises OSError or ValueError when it holds no tokenizer.json that can be read."""
        digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        return cls(PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True), digest)

    def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """Ids of ``text``. A text that spells its own leading BOS does not get a second one.

        Raises TooLong for more than ``max_tokens``; at once where that can be told from the length of the text.
        """
        if max_tokens is not None and self.most_chars and len(text) > max_tokens * self.most_chars:
            raise TooLong(-(-len(text) // self.most_chars), at_least=True)
        # Of the backend's ways to encode, only those for batches let other threads run meanwhile.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooLong(len(encoding))  # before a million ids become Python's, which no thread can run beside
        ids: list[int] = encoding.ids
        if len(ids) > 1 and ids[0] == ids[1] == self._model.bos_token_id:
            del ids[0]
        return ids

    def spelled(self, token_id: int) -> bytes:
        """The bytes a token stands for, special ones spelled out; none for an unused id."""
        if self.is_byte_level:
            return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.special_ids:
            return str(token).encode()
        byte = re.fullmatch("<0x([0-9A-F]{2})>", token)
        return bytes.fromhex(byte[1]) if byte else str(token).replace(WORD_START, " ").encode()

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """How the vocabulary writes each id; empty for an unused one."""
        return [self._backend.id_to_token(token_id) or "" for token_id in ids]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of all ``ids`` at once."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def added_ids(self, spelled: Iterable[str]) -> dict[str, int]:
        """Those that are tokens by themselves, special or not: no other tokens make up their text."""
        return {text: self._added_ids[text] for text in spelled if text in self._added_ids}

    @property
    def special_tokens(self) -> dict[str, Any]:
        """By the names that templates know them by."""
        return dict(self._model.special_tokens_map)

    def chat_template(self, with_tools: bool = False) -> ChatTemplate | None:
        """That of the model folder, if it brought one; some have another one for conversations with tools."""
        source = self._model.chat_template
        if isinstance(source, dict):
            source = source.get("tool_use" if with_tools and "tool_use" in source else "default")
        if not source:
            return None
        if source not in self._chat_templates:
            self._chat_templates[source] = ChatTemplate(source, self.special_tokens)
        return self._chat_templates[source]


def _most_chars(described: dict[str, Any], token_bytes: Sequence[bytes]) -> int:
    """Of a tokenizer whose tokens spell a text byte by byte, unless something on the way takes characters out."""
    normalizer = (described["normalizer"] or {}).get("type")
    composes = {None: 1, "NFC": 4}.get(normalizer, 0)  # NFC makes one character of up to four
    strips = any(token["lstrip"] or token["rstrip"] for token in described["added_tokens"])
    removes = '"Removed"' in json.dumps(described["pre_tokenizer"])
    return 0 if strips or removes else composes * max(map(len, token_bytes), default=0)


def _token_bytes(backend: Backend) -> list[bytes]:
    byte_of = {char: value for value, char in enumerate(byte_level_alphabet())}
    spelled = map(backend.id_to_token, range(backend.get_vocab_size(with_added_tokens=True)))
    return [_bytes_of(token, byte_of) if token is not None else b"" for token in spelled]


def byte_level_alphabet() -> list[str]:
    """The printable character that byte-level vocabularies write for each byte value (GPT-2's ``bytes_to_unicode``)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(others)) for value in range(256)]


def _bytes_of(token: str, byte_of: dict[str, int]) -> bytes:
    """As the byte-level decoder of ``tokenizers``: a token with any character outside the alphabet is plain text."""
    try:
        return bytes([byte_of[char] for char in token])
    except KeyError:
        return token.encode()

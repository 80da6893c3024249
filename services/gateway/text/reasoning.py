"""Splits off what a model thinks before it answers: ``<think>...</think>`` at the start of its text. Pure.

With some templates the prompt ends in ``<think>``, and the text begins inside. Whitespace around both tags is dropped.
"""

from services.gateway.text.parts import Content, Part, Reasoning, held_from

OPEN, CLOSE = "<think>", "</think>"
MARKERS = (OPEN, CLOSE)


def marks_reasoning(template: str) -> bool:
    """Whether a model with this chat template is one that thinks in tags."""
    return OPEN in template or CLOSE in template


def is_open(prompt: str) -> bool:
    """Whether the prompt leaves the model inside its thoughts."""
    return prompt.rstrip().endswith(OPEN)


class ThinkParser:
    """See ``Parser``. A tag that comes later than at the start is text like any other."""

    def __init__(self, *, inside: bool) -> None:
        """``inside``: the prompt has opened the thoughts."""
        self._text = ""
        self._kind: type[Reasoning] | type[Content] | None = Reasoning if inside else None
        """Of the text that comes now; None before the first of it."""
        self._trim = inside
        """Whether whitespace comes first."""

    @property
    def is_thinking(self) -> bool:
        """Whether thoughts have begun and have not ended."""
        return self._kind is Reasoning

    def feed(self, text: str) -> list[Part]:
        """See ``Parser``."""
        return self._parts(text, ended=False)

    def flush(self) -> list[Part]:
        """See ``Parser``."""
        return self._parts("", ended=True)

    def _parts(self, text: str, *, ended: bool) -> list[Part]:
        self._text += text
        if self._kind is None and not self._begin(ended):
            return []
        parts: list[Part] = []
        if self._kind is Reasoning:
            end = self._text.find(CLOSE)
            if end < 0:
                self._tell(parts, len(self._text) if ended else held_from(self._text, CLOSE))
                return parts
            self._tell(parts, len(self._text[:end].rstrip()))
            self._text = self._text.lstrip().removeprefix(CLOSE)
            self._kind, self._trim = Content, True
        self._tell(parts, len(self._text))
        return parts

    def _begin(self, ended: bool) -> bool:
        """Whether it is known by now if the text opens with thoughts."""
        begun = self._text.lstrip()
        if len(begun) < len(OPEN) and OPEN.startswith(begun) and not ended:
            return False
        if begun.startswith(OPEN):
            self._text = begun.removeprefix(OPEN)
            self._kind, self._trim = Reasoning, True
        else:
            self._kind = Content
        return True

    def _tell(self, parts: list[Part], end: int) -> None:
        """The text up to ``end`` leaves."""
        told, self._text = self._text[:end], self._text[end:]
        if self._trim:
            told = told.lstrip()
            self._trim = not told
        if told:
            assert self._kind is not None
            parts.append(self._kind(told))

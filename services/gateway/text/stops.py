"""Finds stop strings in a text that arrives in pieces. Used by ``services.gateway.choice``; pure.

Text that may still grow into a stop string is held back, and nothing else is. The result does not depend on how the
text is cut into pieces: the first stop string to be *completed* ends the text, and of several completed by the same
character the longest (it starts first).
"""

from collections.abc import Sequence


class StopFinder:
    """The state of one text."""

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """``stops``: none of them empty; may itself be empty. ``included``: the text ends with what stopped it."""
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._included = included
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that ended the text."""

    @property
    def stopped(self) -> bool:
        """Whether the text has ended."""
        return self.stopped_by is not None

    def push(self, piece: str, *, armed: bool = True) -> str:
        """Return the text that may leave now. Sets ``stopped_by``: then it ends right before that string, or with it.

        A stop string that is completed by an unarmed piece does not count; one that begins in it does.
        """
        assert not self.stopped
        if not self._stops or not piece:
            return piece
        text = self._held + piece
        if armed and (match := self._first_match(text)) is not None:
            self._held = ""
            start, self.stopped_by = match
            return text[: start + len(self.stopped_by)] if self._included else text[:start]
        held_from = self._held_from(text)
        self._held = text[held_from:]
        return text[:held_from]

    def flush(self) -> str:
        """What was held back; the text is complete without a stop."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Where the first completed stop string starts, and it. One that ends inside the held text was not armed."""
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        return min(matches)[1:] if matches else None

    def _held_from(self, text: str) -> int:
        """Start of the longest tail of ``text`` that is a proper prefix of a stop string."""
        earliest = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= start < earliest:
                if stop.startswith(text[start:]):
                    earliest = start
                    break
                start = text.find(stop[0], start + 1)
        return earliest

"""One choice of one prompt: its tokens become text, stop strings end it, its tokens are counted.

Listens to its stream and tells its ``Generation``. What comes after a stop string appears nowhere: not in the text,
not in the ids, not in the usage.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from services.gateway.streams import Stream, Streams
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stops import StopFinder
from shared.wire.gateway import Delta, Rejected, Submit

Finish = Literal["stop", "length"]
"""All that a client is ever told; everything else is an error."""


class Update(NamedTuple):
    """What a choice got. ``text`` may be empty while a character or a stop string is incomplete."""

    choice: int
    """Its index."""
    text: str
    token_ids: list[int]
    num_tokens: int
    """Of the choice so far, these included."""
    finish: Finish | None


def merged(updates: list[Update]) -> list[Update]:
    """One update per choice, in the order in which they first appear."""
    of_choice: dict[int, list[Update]] = {}
    for update in updates:
        of_choice.setdefault(update.choice, []).append(update)
    return [join(several) for several in of_choice.values()]


def join(updates: Sequence[Update]) -> Update:
    """Several updates of one choice as one."""
    last = updates[-1]
    text = "".join(update.text for update in updates)
    token_ids = [token_id for update in updates for token_id in update.token_ids]
    return Update(last.choice, text, token_ids, last.num_tokens, last.finish)


class ChoiceSink(Protocol):
    """Where a choice's news go: its generation."""

    def accepted(self) -> None:
        """The choice is in the scheduler's queue."""

    def updated(self, choice: "Choice", update: Update) -> None:
        """New text, ids or the finish."""

    def rejected(self, rejected: Rejected) -> None:
        """The scheduler did not take it."""

    def failed(self, reason: str, *, unavailable: bool) -> None:
        """It ends with an error; ``unavailable`` when nothing could serve it."""


class Choice:
    """Its state, from submit to finish."""

    def __init__(self, index: int, detokenizer: Detokenizer, stops: tuple[str, ...], submit: Submit) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached = 0
        self.finish: Finish | None = None
        self.last_token_at = 0.0
        """perf_counter() of its latest tokens; 0 before the first."""
        self._detokenizer = detokenizer
        self._stops = StopFinder(stops)
        self._submit = submit
        self._stream: Stream | None = None

    def open(self, streams: Streams, sink: ChoiceSink) -> None:
        """Submit it."""
        self._streams = streams
        self._sink = sink
        self._stream = streams.open(self._submit, self)

    def close(self, why: str) -> None:
        """Cancel it unless it is over."""
        if self._stream is not None:
            self._streams.cancel(self._stream, why)
            self._stream = None

    # What its stream tells.

    def accepted(self) -> None:
        """See ``StreamListener``."""
        self._sink.accepted()

    def rejected(self, rejected: Rejected) -> None:
        """See ``StreamListener``."""
        self._stream = None
        self._sink.rejected(rejected)

    def failed(self, reason: str, *, unavailable: bool) -> None:
        """See ``StreamListener``."""
        self._stream = None
        self._sink.failed(reason, unavailable=unavailable)

    def tokens(self, token_ids: list[int], delta: Delta) -> None:
        """See ``StreamListener``. The token that ended it (EOS, a stop token) counts, but has no text."""
        if delta.finish is not None:
            self._stream = None
            if delta.usage is not None:
                self.num_cached = delta.usage.cached_tokens
        num_with_text = len(token_ids) - (delta.finish == "stop" and delta.stop_token_id >= 0)
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            if count <= num_with_text:
                text += self._push(self._detokenizer.decode(token_id))
                if self._stops.stopped:
                    self._finish("stop", text, token_ids[:count])
                    return
        if delta.finish == "stop" or delta.finish == "length":
            text += self._rest()
            self._finish("stop" if self._stops.stopped else delta.finish, text, token_ids)
            return
        if token_ids:
            self._sink.updated(self, Update(self.index, text, token_ids, self.num_tokens, None))
        if delta.finish is not None:
            self._sink.failed(delta.error or "the request was cancelled", unavailable=False)

    def _finish(self, reason: Finish, text: str, token_ids: list[int]) -> None:
        self.finish = reason
        self.close("a stop string was found")
        self._sink.updated(self, Update(self.index, text, token_ids, self.num_tokens, reason))

    def _push(self, text: str) -> str:
        return self._stops.push(text, armed=self.num_tokens > self._submit.sampling.min_tokens)

    def _rest(self) -> str:
        """The text is complete: what the detokenizer and the stop finder still hold."""
        text = self._push(self._detokenizer.flush())
        return text if self._stops.stopped else text + self._stops.flush()

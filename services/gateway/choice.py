"""One choice of one prompt: its tokens become text, stop strings end it, its tokens are counted, a parser reads it.

Listens to its stream and tells its ``Generation``. What comes after a stop string appears nowhere: not in the text,
not in the ids, not in the usage.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from services.gateway.logprobs import PromptRecords, Record, TokenLogprobs, read_records
from services.gateway.streams import Stream, Streams
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.echo import Echo
from services.gateway.text.message_parser import MessageParser
from services.gateway.text.parts import Content, Part, joined
from services.gateway.text.stops import StopFinder
from shared.wire.gateway import Delta, Rejected, Submit

Finish = Literal["stop", "length", "tool_calls"]
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
    logprobs: Sequence[TokenLogprobs] = ()
    """Of ``token_ids``, where asked for; before them of the whole prompt, when it is echoed."""
    stop: str | None = None
    """The stop string that ended it."""
    parts: Sequence[Part] = ()
    """What a parser made of the text, if there is one: then ``text`` is empty."""

    @property
    def told(self) -> Sequence[Part]:
        """Its text as parts, parsed or not."""
        return (Content(self.text),) if self.text else self.parts


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
    logprobs = tuple(told for update in updates for told in update.logprobs)
    parts = tuple(joined(part for update in updates for part in update.parts))
    return Update(last.choice, text, token_ids, last.num_tokens, last.finish, logprobs, last.stop, parts)


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

    def expired(self, reason: str) -> None:
        """Its deadline has passed."""


class Nobody:
    """The sink of a choice that is closed. It knows no generation, so that each is freed with its request: together
    they would wait for a search for garbage, and memory that is cold by then is dear."""

    def accepted(self) -> None:
        """See ``ChoiceSink``."""

    def updated(self, choice: "Choice", update: Update) -> None:
        """See ``ChoiceSink``."""

    def rejected(self, rejected: Rejected) -> None:
        """See ``ChoiceSink``."""

    def failed(self, reason: str, *, unavailable: bool) -> None:
        """See ``ChoiceSink``."""

    def expired(self, reason: str) -> None:
        """See ``ChoiceSink``."""


NOBODY = Nobody()


class Choice:
    """Its state, from submit to finish."""

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: StopFinder,
        submit: Submit,
        echo: Echo | None = None,
        *,
        prompt_only: bool = False,
        parser: MessageParser | None = None,
    ) -> None:
        """``echo`` is told before any token; with ``prompt_only`` nothing else is. ``parser`` reads its text."""
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        """Up to the end of its thoughts."""
        self.num_cached = 0
        self.finish: Finish | None = None
        self.first_token_at = self.last_token_at = 0.0
        """perf_counter() of its first and its latest tokens; 0 before."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._submit = submit
        self._stream: Stream | None = None
        self._sink: ChoiceSink = NOBODY
        self._num_logprobs = submit.sampling.num_logprobs
        self._num_chars = len(echo.text) if echo is not None else 0
        """Of its text so far, held back or not."""
        self._echo = echo
        """Until it is told."""
        self._prompt_only = prompt_only
        self._parser = parser
        self._parts: list[Part] = []
        """Until they are told."""
        self._prompt_records: PromptRecords | None = None
        if echo is not None and submit.sampling.prompt_logprobs:
            self._prompt_records = PromptRecords(len(echo.prompt), self._num_logprobs)

    def trace(self, traceparent: str) -> None:
        """Where the spans of its request belong; before ``open``."""
        self._submit = msgspec.structs.replace(self._submit, trace=traceparent)

    def open(self, streams: Streams, sink: ChoiceSink) -> None:
        """Submit it."""
        self._streams = streams
        self._sink = sink
        self._stream = streams.open(self._submit, self)

    def close(self, why: str) -> None:
        """Cancel it unless it is over; its sink hears no more of it."""
        self._cancel(why)
        self._sink = NOBODY

    def _cancel(self, why: str) -> None:
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
        if delta.usage is not None and not self.num_tokens:
            # With its first tokens: it may end here at a stop string, and a later scheduler knows nothing of its start.
            self.num_cached = delta.usage.cached_tokens
        if delta.finish is not None:
            self._stream = None
        if self._echo is not None:
            self._tell_echo(self._echo, delta)
        if not self._prompt_only:
            self._tell(token_ids, delta)
        elif delta.finish == "stop" or delta.finish == "length":
            self._finish("length", "", [], [])
        if delta.finish == "error" or delta.finish == "cancelled":
            self._sink.failed(delta.error or "the request was cancelled", unavailable=False)
        elif delta.finish == "deadline":
            self._sink.expired(delta.error)

    def _tell(self, token_ids: list[int], delta: Delta) -> None:
        """New tokens and the text they bring."""
        num_with_text = len(token_ids) - (delta.finish == "stop" and delta.stop_token_id >= 0)
        records = self._records(delta, len(token_ids)) if self._num_logprobs >= 0 and token_ids else None
        logprobs: list[TokenLogprobs] = []
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            if records is not None:
                logprobs.append(TokenLogprobs(token_id, self._num_chars, *records[count - 1]))
            if count <= num_with_text:
                piece = self._detokenizer.decode(token_id)
                self._num_chars += len(piece)
                text += self._read(self._push(piece))
                if self._stops.stopped:
                    self._finish("stop", text, token_ids[:count], logprobs)
                    return
        if delta.finish == "stop" or delta.finish == "length":
            text += self._read(self._rest())
            self._finish("stop" if self._stops.stopped else delta.finish, text, token_ids, logprobs)
        elif token_ids:
            self._update(text, token_ids, logprobs)

    def _tell_echo(self, echo: Echo, delta: Delta) -> None:
        """The prompt, once all that is to be told of it is there. Raises ValueError when a token comes before that."""
        told: list[TokenLogprobs] = []
        if self._prompt_records is not None:
            if delta.logprobs is not None and delta.logprobs.prompt:
                self._prompt_records.add(delta.logprobs.prompt_start, delta.logprobs.prompt)
            if not self._prompt_records.complete:
                if delta.token_ids or delta.finish in ("stop", "length"):
                    raise ValueError("the logprobs of the prompt are not complete")
                return
            told = self._prompt_records.read(echo.prompt, echo.offsets)
        self._echo = self._prompt_records = None
        self._sink.updated(self, Update(self.index, echo.text, [], 0, None, told))

    def _records(self, delta: Delta, num_tokens: int) -> list[Record]:
        """One for each token of the delta. Raises ValueError."""
        records = read_records(delta.logprobs.output if delta.logprobs is not None else b"", self._num_logprobs)
        if len(records) != num_tokens:
            raise ValueError(f"{num_tokens} tokens came with logprobs of {len(records)}")
        return records

    def _finish(self, reason: Finish, text: str, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        self.finish = reason
        self._cancel("a stop string was found")
        self._update(text, token_ids, logprobs)

    def _update(self, text: str, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        """Tell the text, or what the parser has made of it."""
        if self._parser is not None and self.finish is not None:
            self._parts += self._parser.flush()
            if self.finish == "stop" and self._parser.awaits_results:
                self.finish = "tool_calls"
        parts, self._parts = joined(self._parts), []
        told = (text, token_ids, self.num_tokens, self.finish, logprobs, self._stops.stopped_by, parts)
        self._sink.updated(self, Update(self.index, *told))

    def _read(self, text: str) -> str:
        """What of it is told as text: nothing where a parser makes parts of it."""
        if self._parser is None:
            return text
        self._parts += self._parser.feed(text)
        if self._parser.is_thinking:
            self.num_reasoning_tokens = self.num_tokens
        return ""

    def _push(self, text: str) -> str:
        return self._stops.push(text, armed=self.num_tokens > self._submit.sampling.min_tokens)

    def _rest(self) -> str:
        """The text is complete: what the detokenizer and the stop finder still hold."""
        text = self._push(self._detokenizer.flush())
        return text if self._stops.stopped else text + self._stops.flush()

"""From checked settings and token ids to the HTTP answer, streamed or whole: what all generating endpoints share.

Headers leave once the scheduler has accepted every choice; until then, whatever goes wrong is a status of its own.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from time import perf_counter

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.api.errors import ApiError, internal, invalid
from services.gateway.api.note import Note, note_of
from services.gateway.api.settings import Settings
from services.gateway.api.trace import describe
from services.gateway.choice import Choice, Update, join
from services.gateway.failures import log_failure
from services.gateway.gateway import Gateway
from services.gateway.generation import ClientGone, Generation
from services.gateway.shapes.shape import Outline, Shape
from services.gateway.text.detokenizer import detokenizer
from services.gateway.text.echo import Echo
from services.gateway.text.message_parser import PLAIN, MessageFormat
from services.gateway.text.stops import StopFinder
from services.gateway.usage import Usage
from shared.wire.facts import ModelFacts

_log = logging.getLogger(__name__)

MAX_CHOICES_IN_ALL = 2048
MAX_CONSTRAINT_CHARS_IN_ALL = 2**24
"""Each choice carries its own copy to the scheduler and to its executor."""
MAX_PROMPT_LOGPROBS = 1_000_000
"""Numbers that one request may ask for of its prompts: they are all held until they are sent."""
MAX_TOLD_ON_LOOP = 256
"""Tokens whose logprobs are written where other streams wait for it."""

ShapeOf = Callable[[Outline], Shape]


class Answer:
    """An ASGI response; its shape is the endpoint's."""

    def __init__(
        self,
        gateway: Gateway,
        settings: Settings,
        prompts: Sequence[list[int]],
        facts: ModelFacts,
        shape_of: ShapeOf,
        answer_id: str,
        echoes: Sequence[Echo] | None = None,
        message_format: MessageFormat = PLAIN,
    ) -> None:
        """``echoes``: of each prompt, if any. ``message_format``: how its text is to be read.

        Raises ApiError (400) for what the model's facts do not allow.
        """
        _check_size(settings, prompts)
        self._gateway = gateway
        self._settings = settings
        self._prompts = prompts
        self._echoes = echoes
        self._format = message_format
        self._kept_ids = frozenset(gateway.tokenizer.added_ids(message_format.markers).values())
        self._id = answer_id
        choices = [self._choice(index, facts) for index in range(len(prompts) * settings.n)]
        self._usage = Usage(prompts, choices, settings.n)
        self._generation = Generation(choices, gateway.streams, gateway.metrics)
        model, spell = gateway.options.served_model_name, gateway.tokenizer.spelled
        self._shape = shape_of(Outline(self._id, int(time.time()), model, settings, prompts, self._usage, spell))

    def _choice(self, index: int, facts: ModelFacts) -> Choice:
        settings = self._settings
        prompt = self._prompts[index // settings.n]
        group = f"{self._id}-{index // settings.n}" if settings.n > 1 else ""
        submit = settings.submit(f"{self._id}-{index}", prompt, index % settings.n, facts, group)
        text = detokenizer(
            self._gateway.tokenizer,
            prompt,
            skip_special_tokens=settings.skip_special_tokens,
            kept_ids=self._kept_ids,
        )
        echo = self._echoes[index // settings.n] if self._echoes is not None else None
        parser = self._format.parser()
        stops = StopFinder(settings.stops, included=settings.include_stop)
        return Choice(index, text, stops, submit, echo, prompt_only=settings.prompt_only, parser=parser)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send. The requests of the choices are over when this returns, however it returns."""
        generation = self._generation
        note = note_of(scope)
        note.on_gone = generation.gone
        if note.span is not None:
            generation.trace(note.span.traceparent)
        try:
            if note.client_gone:
                raise ClientGone
            await generation.start()
            self._gateway.metrics.accepted(self._usage.prompt_tokens, self._settings.n, self._settings.max_tokens)
            if self._settings.stream:
                await self._stream(send, note)
            else:
                updates = [join(several) for several in await generation.finished()]
                body = await self._write(self._shape.whole, updates)
                self._first_text(note)
                await Response(body, media_type="application/json")(scope, receive, send)
            self._measure(note.arrived)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except ClientGone:
            note.client_gone = True
        except Exception as error:
            log_failure(_log, "an answer", error)
            await internal().response()(scope, receive, send)
        finally:
            note.on_gone = None
            generation.close()
            self._describe(note)

    def _first_text(self, note: Note) -> None:
        note.first_text_at = perf_counter()
        self._gateway.metrics.first_text(note.first_text_at - note.arrived)

    def _describe(self, note: Note) -> None:
        usage, finishes = self._usage, sorted({choice.finish or "none" for choice in self._generation.choices})
        note.facts = {
            "answer_id": self._id,
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "finish": ",".join(finishes),
        }
        if note.span is not None:
            describe(note.span, self._gateway.options.served_model_name, self._settings, usage, finishes, note)

    async def _stream(self, send: Send, note: Note) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._generation.on_overflow = task.cancel
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        send = note.send_body or send
        try:
            if opening := self._shape.opening():
                await send({"type": "http.response.body", "body": opening, "more_body": True})
            async with contextlib.aclosing(self.events()) as events:
                async for body in events:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    if note.first_text_at is None and body is not self._shape.keep_alive:
                        self._first_text(note)
        except asyncio.CancelledError:
            if not self._generation.overflowed:
                raise
            self._gateway.metrics.client_cut_off()
            _log.warning("cut off a client that did not read its stream")
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def events(self) -> AsyncGenerator[bytes]:
        """A stream behind its opening, piece by piece; closing it at any point cancels the request.

        Raises ClientGone.
        """
        generation, shape = self._generation, self._shape
        try:
            async with contextlib.aclosing(generation.updates()) as batches:
                async for updates in batches:
                    if not updates:
                        yield shape.keep_alive
                    elif body := await self._write(shape.events, updates):
                        yield body
            error = generation.error
        except ClientGone:
            raise
        except Exception as failure:
            log_failure(_log, "a stream", failure)
            error = internal()
        yield shape.ending() if error is None else shape.failure(error)

    async def _write(self, write: Callable[[list[Update]], bytes], updates: list[Update]) -> bytes:
        """What tells of thousands of prompt tokens is written off the loop."""
        if self._settings.prompt_logprobs and sum(len(update.logprobs) for update in updates) > MAX_TOLD_ON_LOOP:
            return await self._gateway.in_thread(partial(write, updates))
        return write(updates)

    def _measure(self, arrived: float) -> None:
        num_outputs = [choice.num_tokens for choice in self._generation.choices]
        self._gateway.metrics.request_ended(perf_counter() - arrived, self._usage.prompt_tokens, num_outputs)


def _check_size(settings: Settings, prompts: Sequence[list[int]]) -> None:
    """Raise ApiError (400) for what is too much for one request, whenever it comes."""
    num_choices, num_tokens = len(prompts) * settings.n, sum(map(len, prompts)) * settings.n
    tenant, constraint = settings.tenant, settings.constraint
    most_choices = min(MAX_CHOICES_IN_ALL, tenant.most_choices or MAX_CHOICES_IN_ALL)
    if num_choices > most_choices:
        raise invalid(f"n times the number of prompts must not be above {most_choices}", "n")
    most_tokens = tenant.most_prompt_tokens
    if num_choices > 1 and most_tokens is not None and num_tokens > most_tokens:
        raise invalid(f"n times the tokens of all prompts must not be above {most_tokens}", "n")
    if constraint is not None and len(constraint.constraint.source) * num_choices > MAX_CONSTRAINT_CHARS_IN_ALL:
        raise invalid(f"{constraint.param} is too long for so many choices", constraint.param)
    if settings.prompt_logprobs:
        num_values = num_tokens * (1 + settings.num_logprobs)
        if num_values > MAX_PROMPT_LOGPROBS:
            raise invalid(f"{num_values} logprobs of prompts are more than {MAX_PROMPT_LOGPROBS}", "logprobs")

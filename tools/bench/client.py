"""The client of a load test: asks any OpenAI-compatible server for one streamed answer and takes the times.

Called by ``tools.bench.serve``.
"""

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from tools.bench.figures import Outcome
from tools.bench.http import EventParser, HttpError, Server, exchange, get_json
from tools.bench.workload import Job

_DONE = b"[DONE]"


class ServerError(Exception):
    """The server cannot be measured; the message says why."""


@dataclass(frozen=True)
class Client:
    """How to ask: ``chat`` uses /v1/chat/completions, else /v1/completions."""

    server: Server
    model: str
    chat: bool
    ignore_eos: bool
    temperature: float
    timeout_s: float

    async def run(self, job: Job) -> Outcome:
        """Send one job and read its answer to the end; whatever goes wrong is the outcome's failure."""
        outcome = Outcome(sent_at=time.monotonic())
        answer = _Answer(outcome)
        request = self.server.request("POST", self._path, self._body(job.prompt, job.max_tokens, stream=True))
        try:
            async with asyncio.timeout(self.timeout_s):
                status = await exchange(self.server, request, answer.sent, answer.body)
            outcome.failure = answer.failure(status)
        except TimeoutError:
            outcome.failure = f"no end within {self.timeout_s:g} s"
        except HttpError as error:
            outcome.failure = str(error)
        except OSError as error:
            outcome.failure = f"connection: {error.strerror or error}"
        outcome.ended_at = time.monotonic()
        return outcome

    async def count_tokens(self, prompt: str) -> int:
        """Prompt tokens of ``prompt`` as this client would send it: by /tokenize where there is one, else by the usage
        of a one-token answer. Raises ServerError."""
        key, value = self._prompt(prompt)
        try:
            status, reply = await get_json(self.server, "POST", "/tokenize", {"model": self.model, key: value})
            if status == 200 and isinstance(reply, dict) and isinstance(reply.get("count"), int):
                return int(reply["count"])
            status, reply = await get_json(self.server, "POST", self._path, self._body(prompt, 1, stream=False))
        except (OSError, HttpError) as error:
            raise ServerError(f"cannot reach {self.server.host}:{self.server.port}: {error}") from error
        try:
            return int(reply["usage"]["prompt_tokens"])
        except (KeyError, TypeError) as error:
            raise ServerError(f"POST {self._path} gave {status}: {_message(reply)}") from error

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def _prompt(self, prompt: str) -> tuple[str, Any]:
        return ("messages", [{"role": "user", "content": prompt}]) if self.chat else ("prompt", prompt)

    def _body(self, prompt: str, max_tokens: int, stream: bool) -> dict[str, Any]:
        key, value = self._prompt(prompt)
        body = {"model": self.model, key: value, "max_tokens": max_tokens, "temperature": self.temperature}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body


class _Answer:
    """Reads one streamed answer into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._events = EventParser()
        self._plain = b""
        self._error = ""
        self._done = False

    def sent(self) -> None:
        self._outcome.sent_at = time.monotonic()

    def body(self, status: int, data: bytes) -> None:
        if status != 200:
            self._plain += data
            return
        now = time.monotonic()
        for event in self._events.feed(data):
            self._event(event, now)

    def _event(self, event: bytes, now: float) -> None:
        if event == _DONE:
            self._done = True
            return
        try:
            chunk = json.loads(event)
        except ValueError:
            self._error = self._error or "an event that is no JSON"
            return
        if chunk.get("error"):
            self._error = self._error or f"error event: {_message(chunk)}"
        if usage := chunk.get("usage"):
            self._outcome.prompt_tokens = usage.get("prompt_tokens")
            self._outcome.completion_tokens = usage.get("completion_tokens")
        for choice in chunk.get("choices") or ():
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                self._outcome.pieces += 1
                self._outcome.last_at = now
                if self._outcome.first_at is None:
                    self._outcome.first_at = now

    def failure(self, status: int) -> str:
        """Empty when the answer is whole."""
        if status != 200:
            try:
                reply = json.loads(self._plain)
            except ValueError:
                reply = None
            return f"HTTP {status}: {_message(reply)}"
        return self._error or ("" if self._done else "the stream ended without [DONE]")


def _message(reply: Any) -> str:
    """What an error body says, in OpenAI's shape or another."""
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    text = str(error.get("message", error) if isinstance(error, dict) else error)
    return text[:200]


async def first_model(server: Server) -> str:
    """Name of the first model that the server offers. Raises ServerError."""
    try:
        status, reply = await get_json(server, "GET", "/v1/models")
    except (OSError, HttpError) as error:
        raise ServerError(f"cannot reach {server.host}:{server.port}: {error}") from error
    try:
        return str(reply["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(f"GET /v1/models gave {status}: {_message(reply)}") from error

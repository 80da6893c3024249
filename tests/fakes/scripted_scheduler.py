"""A scheduler that does what a test tells it, over the real link. Uses ``shared`` only.

Every submit gets an ``Answer`` from the test's ``script``; its tokens leave one per ``tick``, by hand or by themselves.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shared import fake_model
from shared.net.router import Router
from shared.wire import tokens
from shared.wire.codec import gateway_to_scheduler
from shared.wire.facts import ModelFacts
from shared.wire.gateway import (
    Accepted,
    Availability,
    Cancel,
    Delta,
    FinishReason,
    GatewayWelcome,
    Rejected,
    StateQuery,
    StateReply,
    Submit,
    Tokens,
    Usage,
)
from shared.wire.logprobs import Logprobs


@dataclass
class Answer:
    """What a submit gets: its whole output, however often it is submitted again, or a refusal."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason = "length"
    error: str = ""
    reject: tuple[Any, str, int] | None = None
    """Code, detail, retry_after_ms."""
    cached_tokens: int = 0
    silent: bool = False
    """Neither accepted nor rejected."""


Script = Callable[[Submit], Answer]


def says(text: str, finish: FinishReason = "stop", **fields: Any) -> Script:
    """Every request gets this text, a byte per token, and an end token where that ends it."""
    ids = [*text.encode(), *([fake_model.IM_END] if finish == "stop" else [])]
    return lambda submit: Answer(ids, finish, **fields)


@dataclass
class Run:
    """One accepted submit."""

    peer: str
    submit: Submit
    answer: Answer
    num_sent: int
    prompt_told: bool = False
    """Its first tokens'."""


def record(token_id: int, num_logprobs: int, rank: int) -> bytes:
    """Made up: the tokens from ``token_id - rank`` on follow each other in likelihood, each half as likely."""
    top = [(token_id - rank + place) % 1024 for place in range(num_logprobs)]
    told = [-0.5 * (place + 1) for place in range(num_logprobs)]
    return tokens.pack_floats([-0.5 * (rank + 1)]) + tokens.pack(top) + tokens.pack_floats(told)


def prompt_logprobs(submit: Submit, start: int, end: int) -> Logprobs:
    """Of the prompt tokens at these positions: each is the second most likely one."""
    ids = tokens.unpack(submit.prompt)[start:end]
    return Logprobs(b"", start, b"".join(record(token_id, submit.sampling.num_logprobs, 1) for token_id in ids))


def words(submit: Submit) -> Answer:
    """The default script: as many made-up words as asked for, different for each seed and prompt length."""
    start = submit.sampling.seed % 500 + len(submit.prompt)
    return Answer([256 + (start + index) % 700 for index in range(min(submit.max_tokens, 500))])


class ScriptedScheduler:
    """One scheduler at a time on one endpoint; ``restart`` makes the next."""

    def __init__(self, script: Script = words, *, facts: ModelFacts | None = None, auto: bool = True) -> None:
        self.script = script
        self.facts = facts or fake_model.facts()
        self.auto = auto
        """Whether ticks follow each other while anything runs."""
        self.ready = True
        self.reason = ""
        self.submits: list[Submit] = []
        self.cancels: list[Cancel] = []
        self.runs: dict[str, Run] = {}
        self.num_sent = 0
        self.mute_state = False
        self._epoch = 0
        self._ticking: asyncio.Handle | None = None
        self.endpoint = "tcp://127.0.0.1:0"
        self._open()

    def _open(self) -> None:
        self._epoch += 1
        self._router = Router(gateway_to_scheduler, self)
        self.endpoint = self._router.bind(self.endpoint)

    async def __aenter__(self) -> "ScriptedScheduler":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Die: nothing is said to anyone."""
        self.runs.clear()
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None
        await self._router.close()

    def reopen(self) -> None:
        """Come back on the same endpoint as a new process would."""
        self._open()

    def announce(self, *, ready: bool, reason: str = "") -> None:
        """Tell every gateway whether requests can be served."""
        self.ready, self.reason = ready, reason
        for peer in self._router.peers():
            self._router.send(peer, Availability(ready, reason, self.facts))

    def tick(self) -> None:
        """One token for every run."""
        of_peer: dict[str, list[Delta]] = {}
        for request_id, run in list(self.runs.items()):
            of_peer.setdefault(run.peer, []).append(self._next(request_id, run))
        for peer, items in of_peer.items():
            self._router.send(peer, Tokens(items))

    def _next(self, request_id: str, run: Run) -> Delta:
        answer = run.answer
        if run.submit.sampling.prompt_logprobs and not run.prompt_told:
            run.prompt_told = True
            return Delta(request_id, b"", logprobs=prompt_logprobs(run.submit, 1, 3))
        token_ids = answer.token_ids[run.num_sent : run.num_sent + 1]
        logprobs = self._logprobs(run, token_ids)
        run.num_sent += len(token_ids)
        self.num_sent += len(token_ids)
        usage = Usage(len(run.submit.prompt) // 4, run.num_sent, answer.cached_tokens)
        if run.num_sent < len(answer.token_ids):
            is_first = answer.cached_tokens and run.num_sent == len(token_ids)
            return Delta(request_id, tokens.pack(token_ids), usage=usage if is_first else None, logprobs=logprobs)
        del self.runs[request_id]
        stop_token_id = token_ids[-1] if answer.finish == "stop" and token_ids else -1
        return Delta(request_id, tokens.pack(token_ids), answer.finish, usage, answer.error, stop_token_id, logprobs)

    def _logprobs(self, run: Run, token_ids: list[int]) -> Logprobs | None:
        """Those of the token, and before the first of the rest of the prompt; one that was told already again."""
        sampling = run.submit.sampling
        if sampling.num_logprobs < 0:
            return None
        output = b"".join(record(token_id, sampling.num_logprobs, 0) for token_id in token_ids)
        if sampling.prompt_logprobs and not run.submit.output and run.num_sent <= 1:
            rest = prompt_logprobs(run.submit, 2, len(run.submit.prompt) // 4)
            return Logprobs(output, rest.prompt_start, rest.prompt)
        return Logprobs(output)

    def _tick_on(self) -> None:
        self._ticking = None
        self.tick()
        self._keep_ticking()

    def _keep_ticking(self) -> None:
        if self.auto and self.runs and self._ticking is None:
            self._ticking = asyncio.get_running_loop().call_soon(self._tick_on)

    # What the Router tells.

    def hello(self, peer: str, message: Any) -> None:
        self._router.welcome(peer, GatewayWelcome(self._epoch, self.ready, self.reason, self.facts))

    def heartbeat(self, peer: str, message: Any) -> None:
        pass

    def lost(self, peer: str, why: str) -> None:
        self.runs = {request_id: run for request_id, run in self.runs.items() if run.peer != peer}

    def message(self, peer: str, message: Any) -> None:
        match message:
            case Submit():
                self._submit(peer, message)
            case Cancel():
                self.cancels.append(message)
                if self.runs.pop(message.request_id, None) is not None:
                    usage = Usage(0, 0)
                    self._router.send(peer, Tokens([Delta(message.request_id, b"", "cancelled", usage)]))
            case StateQuery() if not self.mute_state:
                state = {"waiting": 0, "running": len(self.runs), "executors": []}
                self._router.send(peer, StateReply(message.query_id, json.dumps(state)))

    def _submit(self, peer: str, submit: Submit) -> None:
        self.submits.append(submit)
        answer = self.script(submit)
        if answer.silent:
            return
        if answer.reject is not None:
            code, detail, retry_after_ms = answer.reject
            self._router.send(peer, Rejected(submit.request_id, code, detail, retry_after_ms))
            return
        self._router.send(peer, Accepted(submit.request_id))
        self.runs[submit.request_id] = Run(peer, submit, answer, len(submit.output) // 4)
        self._keep_ticking()

"""A request's choices together: waiting, slow clients, the end. With tokens fed by hand."""

import asyncio
from typing import Any

import pytest

from services.gateway import generation
from services.gateway.api.errors import ApiError
from services.gateway.choice import Choice
from services.gateway.generation import ClientGone, Generation
from services.gateway.metrics import Metrics
from services.gateway.streams import Streams
from services.gateway.text.detokenizer import detokenizer
from services.gateway.text.fake_tokenizer import fake_tokenizer
from services.gateway.text.stops import StopFinder
from shared.wire import tokens
from shared.wire.gateway import Accepted, Cancel, Delta, Rejected, Submit, Tokens
from shared.wire.sampling import Sampling

TOKENIZER = fake_tokenizer()


class Bench:
    """A generation of ``n`` choices, named 0, 1, ..."""

    def __init__(self, n: int = 1) -> None:
        self.sent: list[Any] = []
        self.streams = Streams()
        self.streams.send = lambda message: self.sent.append(message) is None
        choices = []
        for index in range(n):
            submit = Submit(str(index), tokens.pack([1]), Sampling(), max_tokens=100)
            choices.append(Choice(index, detokenizer(TOKENIZER, [1], skip_special_tokens=True), StopFinder(()), submit))
        self.generation = Generation(choices, self.streams, Metrics("m"))

    async def started(self) -> Generation:
        task = asyncio.create_task(self.generation.start())
        await asyncio.sleep(0)
        for choice in self.generation.choices:
            self.streams.accepted(Accepted(str(choice.index)))
        await task
        return self.generation

    def get(self, index: int, ids: list[int], finish: Any = None, **fields: Any) -> None:
        self.streams.tokens(Tokens([Delta(str(index), tokens.pack(ids), finish, **fields)]))

    @property
    def num_cancelled(self) -> int:
        return sum(isinstance(message, Cancel) for message in self.sent)


async def test_one_update_per_delta_while_the_client_keeps_up_and_one_per_choice_when_it_does_not() -> None:
    bench = Bench(2)
    updates = (await bench.started()).updates()
    for index in (0, 1, 0):
        bench.get(index, [65])
    assert [update.choice for update in await anext(updates)] == [0, 1, 0]
    for index in (1, 0, 1, 1, 0):  # while the reader was busy sending
        bench.get(index, [66])
    assert [(update.choice, update.text) for update in await anext(updates)] == [(1, "BBB"), (0, "BB")]
    bench.get(0, [67], "length")
    bench.get(1, [67], "length")
    assert len(await anext(updates)) == 2
    with pytest.raises(StopAsyncIteration):
        await anext(updates)
    assert bench.num_cancelled == 0


async def test_whole_answers_wake_their_reader_once() -> None:
    bench = Bench()
    task = asyncio.create_task((await bench.started()).finished())
    for _ in range(5):
        bench.get(0, [65])
        await asyncio.sleep(0)
        assert not task.done()
    bench.get(0, [66], "length")
    (updates,) = await task
    assert "".join(update.text for update in updates) == "AAAAAB"


async def test_a_failure_of_one_choice_ends_all_after_the_text_so_far() -> None:
    bench = Bench(2)
    running = await bench.started()
    updates = running.updates()
    bench.get(1, [65])
    bench.get(0, [], "error", error="NaN")
    assert [update.text for update in await anext(updates)] == ["A"]
    with pytest.raises(StopAsyncIteration):
        await anext(updates)
    assert running.error is not None
    assert running.error.status == 500
    assert bench.num_cancelled == 1
    assert len(bench.streams) == 0


async def test_a_rejection_is_raised_from_start() -> None:
    bench = Bench(2)
    task = asyncio.create_task(bench.generation.start())
    await asyncio.sleep(0)
    bench.streams.accepted(Accepted("0"))
    bench.streams.rejected(Rejected("1", "queue_full", "full", 1500))
    with pytest.raises(ApiError) as raised:
        await task
    assert (raised.value.status, raised.value.headers) == (429, {"Retry-After": "2"})
    assert len(bench.streams) == 0


async def test_a_client_that_leaves_ends_every_wait() -> None:
    bench = Bench()
    starting = asyncio.create_task(bench.generation.start())
    await asyncio.sleep(0)
    bench.generation.gone()
    with pytest.raises(ClientGone):
        await starting
    bench = Bench()
    whole = asyncio.create_task((await bench.started()).finished())
    await asyncio.sleep(0)
    bench.generation.gone()
    with pytest.raises(ClientGone):
        await whole
    bench = Bench()
    streamed = (await bench.started()).updates()
    waiting = asyncio.ensure_future(anext(streamed))
    await asyncio.sleep(0)
    bench.generation.gone()
    with pytest.raises(ClientGone):
        await waiting
    assert bench.num_cancelled == 1


async def test_overflow_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "MAX_WAITING_TOKENS", 3)
    bench = Bench()
    running = await bench.started()
    calls: list[None] = []
    running.on_overflow = lambda: calls.append(None)
    updates = running.updates()
    bench.get(0, [65])
    await anext(updates)
    for _ in range(6):
        bench.get(0, [65])
    assert (len(calls), running.overflowed, bench.num_cancelled) == (1, True, 1)
    await updates.aclose()

"""One ZeroMQ socket on the event loop: nothing unread is forgotten, and nobody else starves."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq

from shared.net.loop import MESSAGES_PER_TURN, Callbacks, LoopSocket
from tests.fakes.waiting import await_until


class Pair:
    """A LoopSocket and the plain socket on its other side, connected in memory."""

    def __init__(self, context: "zmq.Context[Any]") -> None:
        self.received: list[bytes] = []
        self.plain = context.socket(zmq.PAIR)
        self.plain.bind("inproc://pair")
        ours = context.socket(zmq.PAIR)
        ours.connect("inproc://pair")
        self.link = LoopSocket(Callbacks(None), ours, lambda frames: self.on_frames(frames), lambda: None, str)

    def on_frames(self, frames: list[bytes]) -> None:
        self.received.extend(frames)


@asynccontextmanager
async def _pair() -> AsyncIterator[Pair]:
    with zmq.Context() as context:
        pair = Pair(context)
        yield pair
        pair.link.close(0)
        pair.plain.close(linger=0)


async def test_what_was_there_before_the_loop_listened_is_read() -> None:
    async with _pair() as pair:
        pair.plain.send(b"early")
        await await_until(lambda: pair.received == [b"early"], 5, "the message")


async def test_a_message_that_arrives_while_we_send_is_read() -> None:
    """Each send may swallow the descriptor's edge."""
    async with _pair() as pair:
        for number in range(200):
            pair.plain.send(b"%d" % number)
            assert pair.link.send([b"x"]) is None
            await await_until(lambda: len(pair.received) == number + 1, 5, "the message")  # noqa: B023


async def test_other_callbacks_have_their_turn_during_a_flood() -> None:
    async with _pair() as pair:
        await asyncio.sleep(0)
        total = 4 * MESSAGES_PER_TURN
        seen: list[int] = []
        for _ in range(total):
            pair.plain.send(b"x")
        while len(pair.received) < total:
            seen.append(len(pair.received))
            await asyncio.sleep(0)
        seen.append(len(pair.received))
        steps = [after - before for before, after in itertools.pairwise(seen)]
        assert max(steps) <= 2 * MESSAGES_PER_TURN
        assert sum(1 for step in steps if step) >= 2


async def test_a_callback_may_close_the_socket_while_messages_wait() -> None:
    with zmq.Context() as context:
        pair = Pair(context)
        pair.on_frames = lambda frames: (pair.received.extend(frames), pair.link.close(0))
        for _ in range(3):
            pair.plain.send(b"x")
        await await_until(lambda: pair.received, 5, "the first message")
        await asyncio.sleep(0)
        assert pair.received == [b"x"]
        pair.plain.close(linger=0)


async def test_a_full_pipe_is_a_value_and_our_own_mistake_an_exception() -> None:
    async with _pair() as pair:
        while (problem := pair.link.send([b"x"])) is None:
            pass
        assert "full" in problem
        with pytest.raises(TypeError):
            pair.link.send(["text"])


async def test_an_exception_in_a_callback_goes_to_on_crash() -> None:
    errors: list[BaseException] = []
    callbacks = Callbacks(errors.append)

    def broken() -> None:
        raise RuntimeError("x")

    callbacks.soon(broken)
    callbacks.later(0, broken)
    await await_until(lambda: len(errors) == 2, 5, "both")

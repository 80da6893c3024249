"""The gateway's end of the link as a handler: readiness, recovery timer, queries; its messages handed in by hand."""

import asyncio
import logging
from typing import Any

import pytest

from services.gateway.link import Link
from services.gateway.streams import Streams
from shared import fake_model
from shared.wire import tokens
from shared.wire.gateway import Availability, GatewayWelcome, Rejected, StateQuery, StateReply, Submit
from shared.wire.sampling import Sampling
from tests.fakes.waiting import await_until

FACTS = fake_model.facts()


class Dealer:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def start(self) -> None:
        pass

    def send(self, message: Any) -> bool:
        self.sent.append(message)
        return True

    async def close(self) -> None:
        pass


class Listener:
    """Keeps why a stream failed."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def accepted(self) -> None:
        pass

    def rejected(self, rejected: Rejected) -> None:
        self.failures.append(rejected.code)

    def failed(self, reason: str, *, unavailable: bool) -> None:
        self.failures.append(reason)


def linked(recovery_timeout_s: float = 60.0) -> tuple[Link, Dealer, Streams]:
    streams = Streams()
    link = Link("tcp://127.0.0.1:1", "g", "fake", recovery_timeout_s, streams)
    dealer = Dealer()
    link._dealer = dealer
    streams.send = dealer.send
    link.start()
    return link, dealer, streams


def submit(name: str) -> Submit:
    return Submit(name, tokens.pack([1]), Sampling(), max_tokens=5)


async def test_ready_needs_a_session_an_executor_and_its_tokenizer() -> None:
    link, _, _ = linked()
    assert (link.ready, link.reason) == (False, "no scheduler yet")
    link.welcome(GatewayWelcome(1, False, "no executor has joined"))
    assert (link.ready, link.reason) == (False, "no executor has joined")
    link.message(Availability(True, "", FACTS))
    assert (link.ready, link.facts) == (True, FACTS)
    link.message(Availability(False, "all left"))
    assert (link.ready, link.facts) == (False, FACTS)
    link.lost("silence")
    assert "silence" in link.reason
    link.refused("protocol 2")
    assert "protocol 2" in link.reason
    link.welcome(GatewayWelcome(2, True, "", FACTS))
    assert link.ready
    await link.close()


async def test_streams_fail_after_the_recovery_timeout_and_not_before() -> None:
    link, _, streams = linked(recovery_timeout_s=0.05)
    link.welcome(GatewayWelcome(1, True, "", FACTS))
    listener = Listener()
    streams.open(submit("a"), listener)
    link.lost("crash")
    link.welcome(GatewayWelcome(2, True, "", FACTS))
    await asyncio.wait([asyncio.ensure_future(asyncio.Event().wait())], timeout=0.1)
    assert not listener.failures
    link.lost("crash")
    await await_until(lambda: listener.failures, 2, "the stream failed")
    assert "nothing could serve" in listener.failures[0]
    await link.close()


async def test_a_new_session_gets_the_live_streams() -> None:
    link, dealer, streams = linked()
    link.welcome(GatewayWelcome(1, True, "", FACTS))
    streams.open(submit("a"), Listener())
    link.lost("crash")
    dealer.sent.clear()
    link.welcome(GatewayWelcome(2, False, "no executor yet", FACTS))
    assert dealer.sent == [submit("a")]
    await link.close()


async def test_state_queries() -> None:
    link, dealer, _ = linked()
    asking = asyncio.ensure_future(link.query_state(5))
    await await_until(lambda: dealer.sent, 2, "asked")
    assert dealer.sent == [StateQuery(1)]
    link.message(StateReply(99, "{}"))
    link.message(StateReply(1, '{"waiting":3}'))
    link.message(StateReply(1, '{"waiting":4}'))
    assert await asking == {"waiting": 3}
    with pytest.raises(TimeoutError):
        await link.query_state(0.01)
    broken = asyncio.ensure_future(link.query_state(5))
    await await_until(lambda: len(dealer.sent) == 3, 2, "asked")
    link.message(StateReply(3, "no JSON"))
    with pytest.raises(ValueError, match="JSON"):
        await broken
    await link.close()


async def test_the_same_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    link, _, _ = linked()
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            link.message(Availability(False, "no executor has joined"))
    assert sum("no executor has joined" in record.getMessage() for record in caplog.records) == 1
    await link.close()

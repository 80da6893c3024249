"""Sessions on real sockets: what opens one, what ends it, and that nothing of it outlives it."""

import asyncio
import itertools
import time
from typing import Any

import pytest
import zmq

from shared.net import dealer as dealer_module
from shared.net import session
from shared.net.crash import Crash
from shared.wire import codec, gateway
from shared.wire.sampling import Sampling
from shared.wire.session import Goodbye, Heartbeat, Refused, Rehello
from tests.fakes.links import (
    ANYWHERE,
    FAST,
    PATIENT,
    DealerEnd,
    RawPeer,
    RouterEnd,
    dealer_end,
    link_child,
    raw_peer,
    raw_socket,
    router_end,
)
from tests.fakes.waiting import await_until


def _submit(request_id: str) -> gateway.Submit:
    return gateway.Submit(request_id, prompt=b"\1\0\0\0", sampling=Sampling(), max_tokens=1)


async def _open_raw(end: RouterEnd, peer: RawPeer) -> None:
    peer.say_hello()
    await await_until(
        lambda: (got := peer.poll()) and isinstance(got[1], gateway.GatewayWelcome),
        5,
        "a welcome, whatever came before",
    )
    assert end.router.peers()


async def test_messages_keep_their_order_in_both_directions() -> None:
    async with router_end(**PATIENT) as (end, address), dealer_end(address, **PATIENT) as other:
        await await_until(lambda: other.dealer.connected, 5, "a session")
        (peer,) = end.router.peers()
        assert peer.startswith("gateway-one-")
        for number in range(3000):
            assert other.dealer.send(gateway.Cancel(str(number)))
            assert end.router.send(peer, gateway.Accepted(str(number)))
        await await_until(lambda: len(end.messages) == len(other.messages) == 3000, 10, "all messages")
        numbers = [str(number) for number in range(3000)]
        assert [message.request_id for _, message in end.messages] == numbers
        assert [message.request_id for message in other.messages] == numbers
        assert not end.router.counters
        assert not other.dealer.counters


async def test_goodbye_ends_the_session_at_once() -> None:
    async with router_end(**PATIENT) as (end, address):
        async with dealer_end(address, **PATIENT) as other:
            await await_until(lambda: other.dealer.connected, 5, "a session")
        await await_until(lambda: end.losses, 5, "the loss")
        assert [why for _, why in end.losses] == ["goodbye"]
        assert end.router.peers() == []


async def test_heartbeats_keep_an_idle_session_open_and_carry_what_the_handler_says() -> None:
    async with router_end(**FAST) as (end, address), dealer_end(address, **FAST) as other:
        other.heartbeat = lambda: Heartbeat(busy_ms=7)
        await await_until(lambda: len(end.heartbeats) >= 10, 10, "ten heartbeats")
        assert {message.busy_ms for _, message in end.heartbeats} == {7}
        assert not end.losses
        assert not other.losses


@pytest.mark.parametrize("stopped_s", [1.0, 3.0], ids=["twice the timeout", "six times the timeout"])
async def test_a_stopped_peer_wakes_up_in_a_dead_session_and_gets_a_new_one(stopped_s: float) -> None:
    async with router_end(**FAST) as (end, address):
        with link_child("dealer", address, "0.1", "0.5") as child:
            await await_until(lambda: end.messages, 60, "the first message of the child")
            (old,) = end.router.peers()
            child.stop()
            end_of_stop = time.monotonic() + stopped_s
            await await_until(lambda: end.losses and time.monotonic() > end_of_stop, stopped_s + 5, "the loss")
            assert end.losses[0][0] == old
            assert "silent" in end.losses[0][1]
            assert end.router.peers() == []
            heard_before = len(end.messages)
            child.go_on()
            await await_until(lambda: len(child.events("welcome")) == 2, 10, "a new session")
            await await_until(lambda: len(end.messages) > heard_before, 10, "a message of the new session")
            (new,) = end.router.peers()
            assert new != old
            # What it says in the dead session reaches nobody, and it hears of the loss before the new welcome.
            assert {(peer, message.request_id) for peer, message in end.messages[heard_before:]} == {(new, "session-2")}
            assert [line[0] for line in child.lines[:3]] == ["welcome", "lost", "welcome"]
            assert end.order == [("hello", old), ("lost", old), ("hello", new)]


async def test_a_side_that_was_stopped_itself_declares_nobody_lost() -> None:
    with link_child("router", ANYWHERE, "0.1", "0.5") as child:
        await await_until(lambda: child.events("address"), 60, "the child's address")
        # This side beats as fast as the child expects, and is itself patient.
        async with dealer_end(child.events("address")[0][1], interval_s=0.1, timeout_s=60.0) as other:
            await await_until(lambda: child.events("heartbeat"), 10, "a heartbeat")
            child.stop()
            end_of_stop = time.monotonic() + 1.5
            await await_until(lambda: time.monotonic() > end_of_stop, 5, "three times the timeout")
            child.go_on()
            heartbeats = len(child.events("heartbeat"))
            await await_until(lambda: len(child.events("heartbeat")) > heartbeats + 20, 60, "more heartbeats")
            assert not child.events("lost")
            assert not other.losses


async def test_a_scheduler_that_was_stopped_is_left_and_found_again_when_it_wakes_up() -> None:
    with link_child("router", ANYWHERE, "0.1", "0.5") as child:
        await await_until(lambda: child.events("address"), 60, "the child's address")
        async with dealer_end(child.events("address")[0][1], **FAST) as other:
            await await_until(lambda: child.events("heartbeat"), 10, "a heartbeat")
            child.stop()
            end_of_stop = time.monotonic() + 1.0
            await await_until(lambda: other.losses and time.monotonic() > end_of_stop, 5, "the loss")
            assert "silent" in other.losses[0]
            assert not other.dealer.connected
            assert other.dealer.send(gateway.Cancel("nobody")) is False
            child.go_on()
            await await_until(lambda: other.dealer.connected, 10, "a new session")
            await await_until(lambda: child.events("lost"), 10, "the end of the old one")
            (old, *_, new) = (line[1] for line in child.events("hello"))
            assert child.events("lost")[0][1] == old
            heartbeats = len(child.events("heartbeat"))
            await await_until(lambda: len(child.events("heartbeat")) > heartbeats + 5, 10, "more heartbeats")
            assert child.events("heartbeat")[-1][1] == new
            assert len(other.welcomes) == 2


async def test_a_killed_peer_is_lost_at_once_and_not_only_by_silence() -> None:
    async with router_end(**PATIENT) as (end, address):
        with link_child("dealer", address, "20", "60") as child:
            await await_until(lambda: end.router.peers(), 60, "a session")
            child.kill()
            await await_until(lambda: end.losses, 5, "the loss")
            assert end.router.peers() == []


async def test_a_killed_scheduler_is_noticed_at_once_and_found_again() -> None:
    with link_child("router", ANYWHERE, "20", "60") as child:
        await await_until(lambda: child.events("address"), 60, "the child's address")
        address = child.events("address")[0][1]
        async with dealer_end(address, interval_s=0.5, timeout_s=60.0) as other:
            await await_until(lambda: other.dealer.connected, 10, "a session")
            child.kill()
            await await_until(lambda: other.losses, 5, "the loss")
            with link_child("router", address, "20", "60") as successor:
                await await_until(lambda: other.dealer.connected, 60, "a session with its successor")
                await await_until(lambda: successor.events("hello"), 5, "its report")
                assert len(other.welcomes) == 2


async def test_submits_queued_for_a_scheduler_that_restarts_never_reach_its_successor() -> None:
    async with router_end(**PATIENT) as (first, address):
        other = DealerEnd(address, **PATIENT)
        other.dealer.start()
        await await_until(lambda: other.dealer.connected, 5, "a session")
    for number in range(100):  # the connection is gone, but the loop has not told the dealer yet
        other.dealer.send(_submit(f"old-{number}"))
    async with router_end(address, **PATIENT) as (second, _):
        await await_until(lambda: len(other.welcomes) == 2, 10, "the new session")
        assert other.dealer.send(_submit("new"))
        await await_until(lambda: second.messages, 5, "the new submit")
        assert [message.request_id for _, message in second.messages] == ["new"]
        assert len(other.losses) == 1
        await other.dealer.close()
    assert first.messages == []


async def test_a_peer_that_reconnects_by_itself_is_fenced_by_the_session() -> None:
    """A plain ZeroMQ DEALER reconnects under its old identity and sends what was queued; measured to arrive."""
    async with router_end(**PATIENT) as (first, address):
        with raw_peer(address) as peer:
            await _open_raw(first, peer)
            old_session = peer.session_id
            await first.router.close()
            for number in range(10):
                peer.send(_submit(f"old-{number}"))
            async with router_end(address, **PATIENT) as (second, _):
                replies: list[Any] = []
                await await_until(lambda: (replies.append(peer.poll()), replies[-1])[1], 10, "an answer")
                assert replies[-1] == (session.NO_SESSION, Rehello())
                await await_until(lambda: second.router.counters[session.BAD_SESSION] == 10, 5, "all counted")
                assert second.messages == []
                assert second.hellos == []
                await _open_raw(second, peer)
                assert peer.session_id != old_session


async def test_a_peer_that_does_not_read_is_lost_and_every_message_is_accounted_for() -> None:
    async with router_end(**PATIENT) as (end, address):
        with raw_peer(address, RCVHWM=100) as peer:
            await _open_raw(end, peer)
            (name,) = end.router.peers()
            payload = gateway.Accepted("x" * 2000)
            sent = 0
            started = time.monotonic()
            while end.router.send(name, payload):
                sent += 1
                assert sent < 100_000, "the pipe never fills"
            assert time.monotonic() - started < 20, "sending waits"
            assert end.losses == [], "the handler is called inside send"
            await await_until(lambda: end.losses, 5, "the loss")
            assert "full" in end.losses[0][1]
            assert end.router.send(name, payload) is False
            assert end.router.counters == {session.NOT_SENT: 1, session.UNKNOWN_PEER: 1}
            received = 0
            deadline = time.monotonic() + 20
            while received < sent and time.monotonic() < deadline:
                if peer.socket.poll(1000):
                    assert peer.poll() == (peer.session_id, payload)
                    received += 1
            assert received == sent
            assert peer.poll() is None
            # It is alive after all: its dead session is answered, and a hello opens a new one.
            peer.send(gateway.Cancel("x"))
            await await_until(lambda: peer.poll() == (session.NO_SESSION, Rehello()), 5, "Rehello")
            await _open_raw(end, peer)


async def test_a_scheduler_that_does_not_read_costs_the_session_not_the_message_count() -> None:
    with raw_socket(zmq.ROUTER, RCVHWM=100) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        async with dealer_end(f"tcp://127.0.0.1:{port}", **PATIENT) as other:
            await await_until(lambda: socket.poll(0), 5, "the hello")
            identity = socket.recv_multipart()[0]
            welcome = gateway.GatewayWelcome(epoch=1, ready=True)
            socket.send_multipart([identity, *session.frames_of(5, welcome)])
            await await_until(lambda: other.dealer.connected, 5, "the welcome")
            payload = gateway.Cancel("x" * 2000)
            sent = sum(1 for _ in itertools.takewhile(bool, (other.dealer.send(payload) for _ in range(100_000))))
            assert sent < 100_000, "the pipe never fills"
            assert other.losses == []
            assert not other.dealer.connected
            await await_until(lambda: other.losses, 5, "the loss")
            assert "full" in other.losses[0]
            assert other.dealer.counters[session.NOT_SENT] == 1


async def test_a_silent_scheduler_is_lost() -> None:
    with raw_socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        async with dealer_end(f"tcp://127.0.0.1:{port}", **FAST) as other:
            await await_until(lambda: socket.poll(0), 5, "the hello")
            first = socket.recv_multipart()[0]
            socket.send_multipart([first, *session.frames_of(5, gateway.GatewayWelcome(epoch=1, ready=True))])
            await await_until(lambda: other.losses, 5, "the loss")
            assert "silent" in other.losses[0]
            names = {first}
            # An unanswered hello is repeated from a new socket, under a new identity.
            await await_until(
                lambda: (socket.poll(0) and names.add(socket.recv_multipart()[0])) or len(names) >= 3, 10, "new hellos"
            )
            assert not other.dealer.connected


async def test_an_unknown_peer_can_neither_be_sent_to_nor_speak() -> None:
    async with router_end(**PATIENT) as (end, address):
        assert end.router.send("gateway-nobody-1", gateway.Accepted("x")) is False
        assert end.router.counters == {session.UNKNOWN_PEER: 1}
        with raw_peer(address) as peer:
            peer.send(_submit("no hello"), session_id=77)
            await await_until(lambda: peer.poll() == (session.NO_SESSION, Rehello()), 5, "Rehello")
            peer.send(_submit("no session"), session_id=session.NO_SESSION)
            await await_until(lambda: end.router.counters[session.UNEXPECTED] == 1, 5, "the count")
        assert end.messages == []
        assert end.losses == []


async def test_a_duplicate_identity_is_unheard_and_does_not_touch_the_session() -> None:
    async with router_end(**PATIENT) as (end, address):
        with raw_peer(address) as first:
            await _open_raw(end, first)
            with raw_peer(address) as second:
                second.say_hello()
                second.send(gateway.Cancel("second"), session_id=first.session_id)
                with raw_peer(address, b"gateway-raw-2") as third:  # heard after the second's frames would have been
                    await _open_raw(end, third)
                assert second.poll() is None
            first.send(gateway.Cancel("first"))
            await await_until(lambda: end.messages, 5, "a message")
            assert [message.request_id for _, message in end.messages] == ["first"]
            assert "gateway-raw-1" in end.router.peers()
            assert end.hellos == ["gateway-raw-1", "gateway-raw-2"]


async def test_a_second_hello_ends_the_session_before_it_opens_another() -> None:
    async with router_end(**PATIENT) as (end, address):
        with raw_peer(address) as peer:
            await _open_raw(end, peer)
            old_session = peer.session_id
            await _open_raw(end, peer)
            await await_until(lambda: len(end.hellos) == 2, 5, "the second hello")
            assert end.order == [("hello", "gateway-raw-1"), ("lost", "gateway-raw-1"), ("hello", "gateway-raw-1")]
            peer.send(gateway.Cancel("old"), session_id=old_session)
            await await_until(lambda: end.router.counters[session.BAD_SESSION] == 1, 5, "the count")
            assert end.messages == []


async def test_another_protocol_is_refused_with_a_message_both_sides_see(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealer_module, "REFUSED_RETRY_S", 0.1)
    async with router_end(**FAST) as (end, address), dealer_end(address, protocol=999, **FAST) as other:
        await await_until(lambda: len(other.refusals) >= 2, 10, "two refusals: it goes on trying")
        assert "999" in other.refusals[0]
        assert "protocol" in other.refusals[0]
        assert other.refusals[0] in caplog.text
        assert end.hellos == []
        assert not other.dealer.connected
        assert not other.losses
        other.protocol = None  # upgraded meanwhile
        await await_until(lambda: other.dealer.connected, 10, "a session")


async def test_the_owner_may_refuse_a_hello() -> None:
    async with router_end(answer=False, **PATIENT) as (end, address), dealer_end(address, **PATIENT) as other:
        await await_until(lambda: end.hellos, 5, "the hello")
        end.router.refuse(end.hellos[0], "another model")
        await await_until(lambda: other.refusals, 5, "the refusal")
        assert other.refusals == ["another model"]


async def test_a_flood_of_hellos_that_are_none_filled_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with router_end(**FAST) as (end, address), dealer_end(address, **PATIENT) as other:
        await await_until(lambda: other.dealer.connected, 5, "a session")
        with raw_peer(address) as peer:
            for _ in range(500):
                peer.socket.send_multipart([bytes(session.SESSION_BYTES), b"junk"])
            await await_until(lambda: end.router.counters[session.REFUSED] == 500, 10, "all are counted")
            await await_until(lambda: "more hellos" in caplog.text, 10, "the rest is summed up")
        assert len(caplog.records) < 200
        assert other.dealer.connected


async def test_garbage_is_counted_and_hurts_nobody() -> None:
    async with router_end(**PATIENT) as (end, address), dealer_end(address, **PATIENT) as other:
        await await_until(lambda: other.dealer.connected, 5, "a session")
        with raw_peer(address) as peer, raw_peer(address, None) as nameless, raw_peer(address, b"\xff\xfe") as strange:
            await _open_raw(end, peer)
            good_frame = peer.session_id.to_bytes(8, "little")
            for _ in range(50):
                for frames in ([b""], [b"x", b"y"], [good_frame], [good_frame, b"", b""], [b"1234567", b"\x90"]):
                    peer.socket.send_multipart(frames)
                for payload in (b"", b"\xc1", b"\x91\xa3abc", b"\xdd\xff\xff\xff\xff", codec.encode(Refused("x"))):
                    peer.socket.send_multipart([good_frame, payload])
                nameless.say_hello()
                strange.say_hello()
            peer.socket.send_multipart([bytes(8), b"garbage"])
            refusals: list[Any] = []
            await await_until(lambda: (m := peer.poll()) and refusals.append(m[1]) is None, 5, "an answer to a hello")
            assert isinstance(refusals[0], Refused)
            counters = end.router.counters
            expected = {
                session.BAD_FRAMES: 250,
                session.NOT_DECODED: 251,
                session.BAD_IDENTITY: 100,
                session.REFUSED: 1,
            }
            await await_until(lambda: counters == expected, 5, f"all counted: {counters}")
            peer.send(gateway.Cancel("still here"))
            assert other.dealer.send(gateway.Cancel("me too"))
            await await_until(lambda: len(end.messages) == 2, 5, "good messages still arrive")
            assert not end.losses
            assert not other.losses


async def test_garbage_from_the_scheduler_is_counted() -> None:
    with raw_socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        async with dealer_end(f"tcp://127.0.0.1:{port}", **PATIENT) as other:
            await await_until(lambda: socket.poll(0), 5, "the hello")
            identity = socket.recv_multipart()[0]
            accepted = codec.encode(gateway.Accepted("x"))
            socket.send_multipart([identity, bytes(8), accepted])
            socket.send_multipart([identity, b"\5" + bytes(7), accepted])
            socket.send_multipart([identity, *session.frames_of(5, gateway.GatewayWelcome(epoch=1, ready=True))])
            for frames in ([b"x"], [bytes(8), accepted], [b"\5" + bytes(7), b"\xc1"], [b"\6" + bytes(7), accepted]):
                socket.send_multipart([identity, *frames])
            socket.send_multipart([identity, b"\5" + bytes(7), accepted])
            await await_until(lambda: other.messages, 5, "the good message")
            assert other.messages == [gateway.Accepted("x")]
            assert other.dealer.counters == {
                session.BAD_FRAMES: 1,
                session.NOT_DECODED: 1,
                session.UNEXPECTED: 2,
                session.BAD_SESSION: 2,
            }


async def test_drop_ends_a_session_without_a_loss() -> None:
    async with router_end(**FAST) as (end, address), dealer_end(address, **FAST) as other:
        await await_until(lambda: other.dealer.connected, 5, "a session")
        (peer,) = end.router.peers()
        end.router.drop(peer)
        end.router.drop(peer)
        assert other.dealer.send(gateway.Cancel("old"))
        await await_until(lambda: len(other.welcomes) == 2, 5, "a new session")
        assert "does not know" in other.losses[0]
        assert end.losses == []
        assert end.messages == []
        assert len(end.hellos) == 2


async def test_a_peer_that_leaves_before_its_welcome_is_lost_after_it() -> None:
    async with router_end(answer=False, **PATIENT) as (end, address):
        with raw_peer(address) as peer:
            peer.say_hello()
            await await_until(lambda: end.hellos, 5, "the hello")
        name = end.hellos[0]

        def gone() -> bool:
            try:
                end.router._link._socket.send_multipart([name.encode(), b""], zmq.NOBLOCK)
            except zmq.ZMQError:
                return True
            return False

        await await_until(gone, 5, "the socket to notice")
        end.router.welcome(name, gateway.GatewayWelcome(epoch=1, ready=True))
        assert end.losses == []
        await await_until(lambda: end.losses, 5, "the loss")
        assert end.router.peers() == []


@pytest.mark.parametrize("side", ["router", "dealer"])
async def test_a_handler_that_raises_ends_the_process_instead_of_being_logged(side: str) -> None:
    crash = Crash()

    def broken(*_: Any) -> None:
        raise RuntimeError("our bug")

    async with (
        router_end(on_crash=crash.report, **PATIENT) as (end, address),
        dealer_end(address, on_crash=crash.report, **PATIENT) as other,
    ):
        await await_until(lambda: other.dealer.connected, 5, "a session")
        if side == "router":
            end.message = broken
            other.dealer.send(gateway.Cancel("x"))
        else:
            other.message = broken
            end.router.send(end.router.peers()[0], gateway.Accepted("x"))
        with pytest.raises(RuntimeError, match="our bug"):
            await asyncio.wait_for(crash.wait(), 5)


async def test_goodbye_from_a_peer_without_a_session_is_harmless() -> None:
    async with router_end(**PATIENT) as (end, address):
        with raw_peer(address) as peer:
            peer.send(Goodbye(), session_id=session.NO_SESSION)
            peer.send(Goodbye(), session_id=3)
            await await_until(lambda: end.router.counters.total() == 2, 5, "both counted")
            assert end.losses == []


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with router_end() as (_, address):
        second = RouterEnd()
        with pytest.raises(zmq.ZMQError, match="in use"):
            second.router.bind(address)


async def test_an_endpoint_that_is_none_is_an_error() -> None:
    with pytest.raises(zmq.ZMQError):
        DealerEnd("nonsense").dealer.start()

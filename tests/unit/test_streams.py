"""Live streams and what is sent again; without sockets."""

from typing import Any

from services.gateway.streams import Streams
from shared.wire import tokens
from shared.wire.gateway import Accepted, Cancel, Delta, Rejected, Submit, Tokens
from shared.wire.sampling import Sampling


class Wire:
    """A scheduler that may be away."""

    def __init__(self) -> None:
        self.away = False
        self.sent: list[Any] = []

    def send(self, message: Any) -> bool:
        if not self.away:
            self.sent.append(message)
        return not self.away


class Listener:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def accepted(self) -> None:
        self.told.append("accepted")

    def rejected(self, rejected: Rejected) -> None:
        self.told.append(rejected.code)

    def tokens(self, token_ids: list[int], delta: Delta) -> None:
        self.told.append(token_ids)

    def failed(self, reason: str, *, unavailable: bool) -> None:
        self.told.append((reason, unavailable))


def world() -> tuple[Streams, Wire]:
    streams, wire = Streams(), Wire()
    streams.send = wire.send
    return streams, wire


def submit(request_id: str = "a", **fields: Any) -> Submit:
    return Submit(request_id, tokens.pack([1, 2]), Sampling(), max_tokens=50, **fields)


def some_tokens(request_id: str, ids: list[int], finish: Any = None) -> Tokens:
    return Tokens([Delta(request_id, tokens.pack(ids), finish)])


def test_a_new_session_gets_each_live_stream_once_with_its_output() -> None:
    streams, wire = world()
    listener = Listener()
    streams.open(submit("a"), listener)
    streams.open(submit("b"), Listener())
    streams.accepted(Accepted("a"))
    streams.tokens(some_tokens("a", [7, 8]))
    streams.tokens(some_tokens("b", [9], "length"))
    streams.session_lost()
    wire.sent.clear()
    streams.resubmit()
    streams.resubmit()
    assert wire.sent == [submit("a", output=tokens.pack([7, 8]), resubmitted=True)]
    streams.accepted(Accepted("a"))
    assert listener.told == ["accepted", [7, 8]]


def test_what_is_opened_while_the_scheduler_is_away_goes_out_later() -> None:
    streams, wire = world()
    wire.away = True
    streams.open(submit("a"), Listener())
    wire.away = False
    streams.resubmit()
    assert wire.sent == [submit("a")]


def test_cancelled_while_away_is_never_sent() -> None:
    streams, wire = world()
    stream = streams.open(submit("a"), Listener())
    streams.session_lost()
    streams.cancel(stream, "gone")
    streams.resubmit()
    assert wire.sent == [submit("a")]
    assert len(streams) == 0


def test_a_deadline_comes_nearer() -> None:
    streams, wire = world()
    stream = streams.open(submit("a", deadline_ms=1000), Listener())
    stream._submitted_at -= 0.6
    assert 1 <= stream.submit().deadline_ms <= 400
    stream._submitted_at -= 10
    assert stream.submit().deadline_ms == 1
    assert wire.sent[0].deadline_ms == 1000


def test_rejections() -> None:
    streams, wire = world()
    new, old = Listener(), Listener()
    streams.open(submit("new"), new)
    streams.open(submit("old"), old)
    streams.accepted(Accepted("old"))
    for name in ("new", "old", "unknown"):
        streams.rejected(Rejected(name, "queue_full", "full"))
    assert new.told == ["queue_full"]
    assert old.told == ["accepted"]
    wire.sent.clear()
    streams.resubmit()
    assert wire.sent == [submit("old", resubmitted=True)]
    streams.rejected(Rejected("old", "too_long", "never fits"))
    assert old.told == ["accepted", "too_long"]
    assert len(streams) == 0


def test_fail_all_tells_everyone_and_cancels() -> None:
    streams, wire = world()
    listener = Listener()
    streams.open(submit("a"), listener)
    streams.fail_all("nothing there")
    assert listener.told == [("nothing there", True)]
    assert wire.sent[-1] == Cancel("a", "nothing there")
    assert len(streams) == 0


def test_a_listener_that_breaks_fails_only_its_own_stream() -> None:
    streams, wire = world()

    class Broken(Listener):
        def tokens(self, token_ids: list[int], delta: Delta) -> None:
            raise RuntimeError

    broken, healthy = Broken(), Listener()
    streams.open(submit("a"), broken)
    streams.open(submit("b"), healthy)
    streams.tokens(Tokens([Delta("a", tokens.pack([1])), Delta("b", tokens.pack([2]))]))
    streams.tokens(Tokens([Delta("b", b"odd"), Delta("unknown", b"")]))
    assert broken.told == [("internal error", False)]
    assert healthy.told == [[2], ("internal error", False)]
    assert wire.sent[-2:] == [Cancel("a", "the gateway failed"), Cancel("b", "the gateway failed")]

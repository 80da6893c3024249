"""Keys on the links: whoever has the right ones notices nothing, whoever has not gets nothing in and breaks nothing."""

import asyncio
import logging
from pathlib import Path

import pytest
import zmq

from shared.net import curve, dealer
from shared.net.curve import PeerKeys, SchedulerKeys
from shared.wire.gateway import Cancel, GatewayWelcome
from tests.fakes.links import PATIENT, dealer_end, router_end
from tests.fakes.waiting import await_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    curve.make_keys(tmp_path / "ours", ["one", "two"])
    curve.make_keys(tmp_path / "theirs", ["one"])
    return tmp_path


def scheduler(folder: Path) -> SchedulerKeys:
    return curve.scheduler_keys(str(folder / "ours/scheduler.key_secret"), str(folder / "ours/clients"))


def peer(folder: Path, own: str = "ours/one", scheduler: str = "ours") -> PeerKeys:
    return curve.peer_keys(str(folder / f"{own}.key_secret"), str(folder / f"{scheduler}/scheduler.key"))


async def test_with_the_right_keys_a_session_opens_both_ways(folder: Path) -> None:
    async with router_end(keys=scheduler(folder), **PATIENT) as (r, address):
        async with (
            dealer_end(address, name="a", keys=peer(folder), **PATIENT) as one,
            dealer_end(address, name="b", keys=peer(folder, "ours/two"), **PATIENT) as two,
        ):
            await await_until(lambda: one.welcomes and two.welcomes, 10, "both are welcome")
            assert one.dealer.send(Cancel("r1"))
            await await_until(lambda: r.messages, 10, "it was heard")
            r.router.send(r.hellos[0], GatewayWelcome(2, True))
            assert r.messages[0][1] == Cancel("r1")
        await await_until(lambda: len(r.losses) == 2, 10, "they left")


@pytest.mark.parametrize(
    ("own", "their_scheduler", "asks", "says"),
    [
        ("theirs/one", "ours", True, "the key is not one of those that may connect"),
        ("ours/one", "theirs", True, "the connection was closed before any key was agreed on"),
        ("", "", True, "key"),
        ("ours/one", "ours", False, "key"),
    ],
    ids=["not-allowed", "another-scheduler", "client-without", "scheduler-without"],
)
async def test_without_the_right_keys_nothing_gets_in_and_both_sides_say_why(
    folder: Path,
    own: str,
    their_scheduler: str,
    asks: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(dealer, "REFUSED_RETRY_S", 0.05)
    monkeypatch.setattr(dealer, "CLOSED_RETRY_S", 0.05)
    caplog.set_level(logging.WARNING)
    mine = peer(folder, own, their_scheduler) if own else None
    async with (
        router_end(keys=scheduler(folder) if asks else None, **PATIENT) as (r, address),
        dealer_end(address, keys=mine, **PATIENT) as d,
    ):
        await await_until(lambda: len(d.refusals) > 1, 10, "the peer is told, and asks again")
        await await_until(lambda: "refused a connection" in caplog.text, 10, "the scheduler says so")
        assert all(says in reason for reason in d.refusals), d.refusals
        assert r.router.counters["refused"]
        assert not r.hellos
        assert not d.welcomes
        async with dealer_end(address, name="good", keys=peer(folder) if asks else None, **PATIENT) as good:
            await await_until(lambda: good.welcomes, 10, "others are served")
        secrets = [peer(folder, own).secret for own in ("ours/one", "ours/scheduler", "theirs/one")]
        assert not any(secret.decode() in caplog.text for secret in secrets)


async def test_a_client_may_be_added_while_the_scheduler_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dealer, "REFUSED_RETRY_S", 0.05)
    curve.make_keys(folder / "ours", ["three"])
    public = folder / "ours/clients/three.key"
    hidden = public.rename(folder / "three.key")
    async with (
        router_end(keys=scheduler(folder), **PATIENT) as (r, address),
        dealer_end(address, keys=peer(folder, "ours/three"), **PATIENT) as d,
    ):
        await await_until(lambda: d.refusals, 10, "it is refused")
        assert not r.hellos
        hidden.rename(public)
        await await_until(lambda: d.welcomes, 10, "it may connect")


async def test_a_folder_that_cannot_be_read_lets_nobody_in(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = scheduler(folder)
    (folder / "ours/clients/broken.key").write_text("nothing")
    async with (
        router_end(keys=keys, **PATIENT) as (r, address),
        dealer_end(address, keys=peer(folder), **PATIENT) as d,
    ):
        await await_until(lambda: d.refusals, 10, "it is refused")
        assert not r.hellos
        assert "cannot read who may connect" in caplog.text


async def test_a_restarted_scheduler_is_found_again(folder: Path) -> None:
    async with router_end(keys=scheduler(folder), **PATIENT) as (_, address):
        peer_end = dealer_end(address, keys=peer(folder), **PATIENT)
        d = await peer_end.__aenter__()
        await await_until(lambda: d.welcomes, 10, "it is welcome")
    try:
        async with router_end(address, keys=scheduler(folder), **PATIENT):
            await await_until(lambda: len(d.welcomes) == 2, 10, "it is welcome again")
        assert not d.refusals
    finally:
        await peer_end.__aexit__(None, None, None)


async def test_what_passes_is_not_to_be_read_on_the_way(folder: Path) -> None:
    """A relay between the two sees a hello's name nowhere."""
    seen = bytearray()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)

        async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while data := await source.read(65536):
                seen.extend(data)
                sink.write(data)
            sink.close()

        await asyncio.gather(pass_on(reader, back), pass_on(there, writer))

    async with router_end(keys=scheduler(folder), **PATIENT) as (r, address):
        port = int(address.rpartition(":")[2])
        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        relayed = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with dealer_end(relayed, keys=peer(folder), **PATIENT) as d:
            await await_until(lambda: d.welcomes, 10, "it is welcome")
            d.dealer.send(Cancel("SECRET-77"))
            await await_until(lambda: r.messages, 10, "it was heard")
        server.close()
        assert len(seen) > 100
        assert b"SECRET-77" not in seen
        assert b"hello" not in seen


def test_files_are_made_once_and_only_their_owner_reads_secrets(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    made = curve.make_keys(folder, ["one"])
    assert sorted(str(path.relative_to(folder)) for path in made) == [
        "clients/one.key",
        "one.key_secret",
        "scheduler.key",
        "scheduler.key_secret",
    ]
    assert all(path.stat().st_mode & 0o077 == 0 for path in made)
    assert not curve.make_keys(folder, ["one"])
    assert len(curve.make_keys(folder, ["one", "two"])) == 2


def test_files_that_are_no_keys_are_told_apart(tmp_path: Path) -> None:
    curve.make_keys(tmp_path, ["one"])
    public, secret = str(tmp_path / "scheduler.key"), str(tmp_path / "one.key_secret")
    (tmp_path / "empty").mkdir()
    for read, problem in (
        (lambda: curve.peer_keys(public, public), "holds no secret key"),
        (lambda: curve.peer_keys(__file__, public), "No public key found"),
        (lambda: curve.scheduler_keys(secret, str(tmp_path / "empty")), "holds no public key"),
    ):
        with pytest.raises(ValueError, match=problem):
            read()
    with pytest.raises(OSError, match="nowhere"):
        curve.peer_keys(secret, str(tmp_path / "nowhere"))
    assert "secret" not in repr(curve.peer_keys(secret, public))


def test_this_zmq_has_what_it_takes() -> None:
    assert zmq.has("curve")

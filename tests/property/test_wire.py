"""W1: every message survives the wire. W2: any bytes give a message or a DecodeError, in bounded memory."""

import resource
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.wire import codec, executor, gateway, tokens
from shared.wire.codec import DecodeError
from shared.wire.sampling import Sampling
from tests.fakes.plans import appends_of
from tests.fakes.wire_messages import DECODERS, SAMPLES, anything, messages_of

DIRECTIONS = list(DECODERS)


def _decode_or_error(direction: str, data: bytes) -> None:
    decoder, _ = DECODERS[direction]
    try:
        message = decoder.decode(data)
    except DecodeError:
        return
    assert isinstance(message, tuple(messages_of(direction)))
    assert decoder.decode(codec.encode(message)) == message or "nan" in repr(message)


@pytest.mark.parametrize("direction", DIRECTIONS)
@given(data=st.data())
def test_w1_any_message_comes_back_equal(direction: str, data: st.DataObject) -> None:
    decoder, union = DECODERS[direction]
    message = data.draw(anything(union))
    assert decoder.decode(codec.encode(message)) == message


@pytest.mark.parametrize("direction", DIRECTIONS)
@given(data=st.binary(max_size=200))
def test_w2_any_bytes(direction: str, data: bytes) -> None:
    _decode_or_error(direction, data)


_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.parametrize("direction", DIRECTIONS)
@given(data=st.data())
def test_w2_any_values_under_a_real_tag(direction: str, data: st.DataObject) -> None:
    tag = data.draw(st.sampled_from([kind.__struct_config__.tag for kind in messages_of(direction)]))
    _decode_or_error(direction, msgpack.packb([tag, *data.draw(st.lists(_plain, max_size=14))]))


@pytest.mark.parametrize("direction", DIRECTIONS)
@given(data=st.data())
def test_w2_damaged_messages(direction: str, data: st.DataObject) -> None:
    payload = bytearray(codec.encode(data.draw(anything(DECODERS[direction][1]))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(payload)))
        match data.draw(st.sampled_from(["change", "insert", "cut", "end"])):
            case "change" if at < len(payload):
                payload[at] = data.draw(st.integers(0, 255))
            case "insert":
                payload[at:at] = data.draw(st.binary(min_size=1, max_size=5))
            case "cut":
                del payload[at : at + data.draw(st.integers(1, 8))]
            case _:
                del payload[at:]
    _decode_or_error(direction, bytes(payload))


def test_w2_a_string_is_not_bytes() -> None:
    submit = gateway.Submit("r", prompt=tokens.pack([1]), sampling=Sampling(), max_tokens=1)
    plain = msgpack.unpackb(codec.encode(submit))
    plain[2] = "AQAAAA=="  # the same bytes as base64 text
    with pytest.raises(DecodeError, match="bytes"):
        codec.gateway_to_scheduler.decode(msgpack.packb(plain))


@pytest.mark.parametrize("plain", [[], [1], [["cancel", "r1"]], ["nothing", "r1"], ["tokens", []], "cancel", None, 7])
def test_w2_what_begins_with_no_tag_of_this_link_is_no_message(plain: Any) -> None:
    with pytest.raises(DecodeError):
        codec.gateway_to_scheduler.decode(msgpack.packb(plain))


def test_w2_bytes_are_not_a_string() -> None:
    with pytest.raises(DecodeError):
        codec.gateway_to_scheduler.decode(msgpack.packb(["cancel", b"r1", ""]))


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdd\x00\x00\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x91"])
def test_w2_hostile_lengths_cost_bounded_memory(header: bytes) -> None:
    """The unpacker goes 1,024 arrays deep and allocates 8 bytes an item; unlimited, 2 MB of this ask for 16 GB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = header * (2_000_000 // len(header))
    for decoder, _ in DECODERS.values():
        with pytest.raises(DecodeError):
            decoder.decode(data)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib * 1024 < 1.2 * 1024 * 8 * codec.MAX_ITEMS


def test_w2_a_frame_over_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(DecodeError, match="11 bytes"):
        codec.gateway_to_scheduler.decode(b"\x00" * 11)


def test_fields_that_a_newer_side_appends_are_ignored_and_missing_ones_get_defaults() -> None:
    longer = msgpack.packb([*msgpack.unpackb(codec.encode(gateway.Cancel("r1", "why"))), "new field"])
    assert codec.gateway_to_scheduler.decode(longer) == gateway.Cancel("r1", "why")
    assert codec.gateway_to_scheduler.decode(msgpack.packb(["cancel", "r1"])) == gateway.Cancel("r1")


def test_every_sample_decodes_in_some_direction() -> None:
    for sample in SAMPLES:
        directions = [name for name in DIRECTIONS if type(sample) in messages_of(name)]
        assert directions
        assert all(DECODERS[name][0].decode(codec.encode(sample)) == sample for name in directions)


_U32 = st.integers(0, 2**32 - 1)


@given(st.lists(_U32))
def test_columns_come_back_equal(values: list[int]) -> None:
    column = tokens.pack(values)
    assert tokens.unpack(column) == values
    assert tokens.count(column) == len(values)


@given(st.binary(max_size=50))
def test_any_bytes_are_a_column_or_a_value_error(data: bytes) -> None:
    for read in (tokens.unpack, tokens.count):
        if len(data) % 4:
            with pytest.raises(ValueError, match=r"."):
                read(data)
        else:
            read(data)


@given(
    st.lists(st.builds(executor.Work, _U32, _U32, _U32, st.booleans()), max_size=5),
    st.lists(st.builds(executor.Append, _U32, _U32), max_size=5),
)
def test_a_plans_rows_come_back_equal(work: list[executor.Work], appends: list[executor.Append]) -> None:
    plan = executor.batch_plan(1, 2, 1, appends=appends, work=work)
    decoded: Any = codec.scheduler_to_executor.decode(codec.encode(plan))
    assert executor.work_of(decoded) == work
    assert list(appends_of(decoded)) == appends


def test_columns_of_unequal_length_are_a_value_error() -> None:
    good = executor.batch_plan(1, 2, 1, work=[executor.Work(0, 0, 1, True)], appends=[executor.Append(0, 1)])
    with pytest.raises(ValueError, match=r"."):
        executor.work_of(msgspec.structs.replace(good, work_starts=b""))
    with pytest.raises(ValueError, match=r"."):
        list(appends_of(msgspec.structs.replace(good, append_blocks=b"")))
    with pytest.raises(ValueError, match=r"."):
        executor.samples_of(executor.BatchResult(1, 2, sample_lanes=tokens.pack([1])))


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "num_lanes", "max_step_tokens"])
def test_an_executor_that_claimed_billions_of_blocks_filled_the_schedulers_memory(name: str) -> None:
    hello = next(sample for sample in SAMPLES if isinstance(sample, executor.ExecutorHello))
    for claim in (0, -1, 2**31, 2**45):
        limits = msgspec.structs.replace(hello.limits, **{name: claim})
        with pytest.raises(DecodeError):
            codec.executor_to_scheduler.decode(codec.encode(msgspec.structs.replace(hello, limits=limits)))

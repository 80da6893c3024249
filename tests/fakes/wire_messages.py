"""All messages of the wire: their struct types, strategies that make any instance, and one full sample of each."""

import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

from shared.wire import codec, executor, gateway, session, tokens
from shared.wire.codec import Decoder
from shared.wire.facts import ExecutorLimits, ModelFacts
from shared.wire.logprobs import Logprobs
from shared.wire.sampling import Constraint, Sampling

DECODERS: dict[str, tuple[Decoder[Any], Any]] = {
    "gateway_to_scheduler": (codec.gateway_to_scheduler, gateway.ToScheduler),
    "scheduler_to_gateway": (codec.scheduler_to_gateway, gateway.ToGateway),
    "executor_to_scheduler": (codec.executor_to_scheduler, executor.ToScheduler),
    "scheduler_to_executor": (codec.scheduler_to_executor, executor.ToExecutor),
}
"""Each direction of each link: its decoder and the union of its messages."""


def messages_of(direction: str) -> list[type[msgspec.Struct]]:
    """The message types of one direction."""
    return list(typing.get_args(DECODERS[direction][1]))


def all_messages() -> list[type[msgspec.Struct]]:
    """Every message type once, in the order of the links."""
    return list(dict.fromkeys(kind for direction in DECODERS for kind in messages_of(direction)))


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Strategy for any instance of a struct type (or of a field's type) that its own rules allow."""
    return _strategy(msgspec.inspect.type_info(kind))


def _strategy(info: Any) -> st.SearchStrategy[Any]:
    inspect = msgspec.inspect
    match info:
        case inspect.StructType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: _strategy(field.type) for field in fields})
        case inspect.IntType(gt=gt, ge=ge, lt=lt, le=le):
            low = -(2**63) if gt is None and ge is None else (ge if gt is None else gt + 1)
            high = 2**63 - 1 if lt is None and le is None else (le if lt is None else lt - 1)
            return st.integers(low, high)
        case inspect.FloatType(ge=ge, le=le):
            return st.floats(ge, le, allow_nan=False)
        case inspect.StrType():
            return st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
        case inspect.BytesType():
            return st.binary(max_size=40)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.ListType(item_type=item):
            return st.lists(_strategy(item), max_size=4)
        case inspect.UnionType(types=types):
            return st.one_of(*map(_strategy, types))
    raise AssertionError(f"no strategy for {info}")


_FACTS = ModelFacts("tiny", 1024, 8192, [1022, 1023], "fake")
_SAMPLING = Sampling(
    0.75,
    40,
    0.9,
    0.05,
    2**63 - 1,
    3,
    tokens.pack([1022]),
    1.25,
    0.5,
    -0.5,
    tokens.pack([7]),
    tokens.pack_floats([-100.0]),
    2,
    True,
    Constraint("regex", "a+"),
)
_RECORD = tokens.pack_floats([-0.5]) + tokens.pack([70000]) + tokens.pack_floats([-0.5])

SAMPLES: list[msgspec.Struct] = [
    gateway.GatewayHello("g1", 41),
    gateway.Submit(
        "r1",
        tokens.pack([5, 6, 7]),
        _SAMPLING,
        99,
        tokens.pack([8]),
        tokens.pack([9]),
        True,
        -2,
        "team",
        "salt",
        5,
        "t",
        True,
        "r",
        gateway.TenantLimits(2.5, 60, 5000, 4),
    ),
    gateway.Cancel("r1", "client left"),
    gateway.StateQuery(7),
    gateway.GatewayWelcome(3, False, "no executor", _FACTS, 4000),
    gateway.Availability(True, "", _FACTS, 4000),
    gateway.Accepted("r1"),
    gateway.Rejected("r2", "queue_full", "64 wait", 1500),
    gateway.Tokens(
        [
            gateway.Delta("r1", tokens.pack([70000])),
            gateway.Delta("r3", tokens.pack([1022]), "stop", gateway.Usage(3, 2, 1), "", 1022),
            gateway.Delta("r4", b"", "error", gateway.Usage(3, 0), "NaN logits"),
            gateway.Delta("r5", tokens.pack([9]), logprobs=Logprobs(_RECORD, 1, _RECORD + _RECORD)),
        ]
    ),
    gateway.StateReply(7, "{}"),
    executor.ExecutorHello("e1", 42, _FACTS, ExecutorLimits(100, 16, 8, 512), "cpu", "abc", 1, ["experts"]),
    executor.ExecutorWelcome(3),
    executor.batch_plan(
        3,
        12,
        10,
        retires=[4],
        admits=[
            executor.Admit(
                1,
                17,
                tokens.pack([5, 6, 7, 8]),
                3,
                0,
                tokens.pack([2]),
                _SAMPLING,
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            )
        ],
        appends=[executor.Append(0, 9)],
        work=[executor.Work(0, 31, 1, True), executor.Work(1, 0, 3, False)],
    ),
    executor.BatchResult(
        3,
        12,
        tokens.pack([0]),
        tokens.pack([16]),
        tokens.pack([70000]),
        [executor.LaneFailure(2, 5, "NaN", True)],
        1234,
        [executor.LaneLogprobs(0, 16, 40, _RECORD)],
    ),
    executor.BatchFailed(3, 13, "error", tokens.pack([1]), "boom", True),
    executor.Draining(4000),
    executor.Drain(),
    executor.Shutdown("told to"),
    session.Refused("another model"),
    session.Rehello(),
    session.Heartbeat(250),
    session.Goodbye(),
]
"""One of each message, every field set."""

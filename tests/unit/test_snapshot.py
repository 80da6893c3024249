"""What a snapshot carries, and what it refuses."""

from array import array
from collections import deque

import msgspec
import pytest

from services.scheduler.core import snapshot
from services.scheduler.core.blocks import BlockPool
from services.scheduler.core.limits import Settings
from services.scheduler.core.machine import Scheduler
from services.scheduler.core.placement import part
from services.scheduler.core.request import Rank, Status
from services.scheduler.core.snapshot import SnapshotError


def again(value: object) -> object:
    """``value`` as the only state of a scheduler, dumped and loaded."""
    scheduler = Scheduler(7, Settings())
    scheduler.extra = value  # type: ignore[attr-defined]
    return snapshot.load(snapshot.dump(scheduler)).extra  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "value",
    [
        None,
        -3,
        2.5,
        "text",
        b"bytes",
        (1, (2, "three")),
        [],
        [1, 2, 2**32 - 1],
        [1, -1],
        [1, None],
        {1: [2], (1, 2): {}},
        deque([1, 2], maxlen=2),
        {3, 1},
        frozenset({"b", "a"}),
        array("q", [-1, 5]),
        Rank(1, 0, 3),
        Status.RUNNING,
        Settings(max_inflight=1),
        part,
        BlockPool,
    ],
)
def test_values_come_back_as_they_were(value: object) -> None:
    back = again(value)
    assert back == value
    assert type(back) is type(value)


def test_what_is_shared_stays_shared_and_cycles_are_kept() -> None:
    shared: list[object] = [1]
    loop: list[object] = [shared, shared]
    loop.append(loop)
    back = again(loop)
    assert back[0] is back[1]  # type: ignore[index]
    assert back[2] is back  # type: ignore[index]


def test_a_chain_of_any_length_is_no_recursion() -> None:
    chain: list[object] = []
    for _ in range(50_000):
        chain = [chain]
    back, depth = again(chain), 0
    while back:
        back, depth = back[0], depth + 1  # type: ignore[index]
    assert depth == 50_000


def test_objects_with_slots_come_back_without_their_constructor() -> None:
    pool = BlockPool(4)
    pool.take(3)
    back = again(pool)
    assert (back.free_blocks(), back.holders) == (pool.free_blocks(), pool.holders)  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [object(), lambda: 0, pytest.raises, open])
def test_what_is_no_part_of_the_core_is_refused_by_name(value: object) -> None:
    with pytest.raises(SnapshotError):
        again(value)


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode([9, [], [], 0])])
def test_other_bytes_are_no_snapshot(data: bytes) -> None:
    with pytest.raises(SnapshotError):
        snapshot.load(data)


def test_a_class_that_has_changed_since_is_told() -> None:
    data = msgspec.msgpack.decode(snapshot.dump(Scheduler(1, Settings())))
    row = next(row for row in data[1] if row[1] == "StepCost" or row[1] == "Outbox")
    row[2].append("another_slot")
    with pytest.raises(SnapshotError, match="is not what it was"):
        snapshot.load(msgspec.msgpack.encode(data))


def test_no_class_from_elsewhere_is_made() -> None:
    data = msgspec.msgpack.decode(snapshot.dump(Scheduler(1, Settings())))
    data[1][0][:2] = ["subprocess", "Popen"]
    with pytest.raises(SnapshotError, match="no part of the core"):
        snapshot.load(msgspec.msgpack.encode(data))

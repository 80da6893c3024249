"""How many blocks are held: what was asked for, else a share of what is free."""

from pathlib import Path
from typing import Any

import pytest
import torch

from services.executor import memory
from services.executor.model.paged import KvShape
from shared.wire.facts import MAX_BLOCKS

CPU = torch.device("cpu")
GIBIBYTE = 1 << 30


LAYERS = [KvShape(num_heads=3, head_dim=8)] * 2


def blocks(**settings: Any) -> int:
    defaults: dict[str, Any] = {
        "block_size": 16,
        "context_len": 128,
        "max_lanes": 10**9,
        "wanted": None,
        "kv_memory": None,
    }
    return memory.num_blocks(LAYERS, CPU, torch.float32, **defaults | settings)


def test_what_is_asked_for_is_held() -> None:
    assert blocks(wanted=7) == 7
    per_block = 2 * 2 * 16 * 3 * 8 * 4
    assert blocks(kv_memory=5 * per_block + 1) == 5
    assert memory.block_bytes(LAYERS, torch.bfloat16, 16) == per_block // 2
    with pytest.raises(ValueError, match="no KV block fits"):
        blocks(kv_memory=per_block - 1)


def test_the_default_is_half_of_what_is_free_up_to_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    per_block = memory.block_bytes(LAYERS, torch.float32, 16)
    for free, expected in ((GIBIBYTE, GIBIBYTE // 2), (100 * GIBIBYTE, 2 * GIBIBYTE)):
        monkeypatch.setattr(memory, "free_bytes", lambda _, free=free: free)
        assert blocks() == expected // per_block
    assert blocks(max_lanes=3) == 3 * 8, "more than all lanes can fill is of no use"
    long_context = 3 * GIBIBYTE // per_block * 16
    assert blocks(context_len=long_context) == long_context // 16, "one whole context, where there is room"


@pytest.mark.parametrize("names", [("memory.max", "memory.current"), None])
def test_the_control_groups_limit_counts(tmp_path: Path, names: tuple[str, str] | None) -> None:
    if names is None:
        assert memory._control_group_room(tmp_path) is None
        return
    for name, content in zip(names, ("1000\n", "400\n"), strict=True):
        (tmp_path / name).write_text(content)
    assert memory._control_group_room(tmp_path) == 600
    (tmp_path / names[0]).write_text("max\n")
    assert memory._control_group_room(tmp_path) is None


def test_free_memory_is_positive_and_less_than_all() -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < memory.free_bytes(CPU) <= total


def test_no_more_blocks_than_a_scheduler_keeps_books_of() -> None:
    assert blocks(wanted=10**9) == MAX_BLOCKS
    assert blocks(kv_memory=10**18) == MAX_BLOCKS

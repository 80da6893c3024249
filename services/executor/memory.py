"""How many KV blocks an executor holds.

Called by the torch backend while it loads. Says what it chose in one log line.
"""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from services.executor.model.paged import KvShape
from shared.wire.facts import MAX_BLOCKS

log = logging.getLogger(__name__)

_DEFAULT_CPU_BYTES = 2 << 30
_DEFAULT_CPU_SHARE = 0.5
_DEFAULT_CUDA_SHARE = 0.85
_MEBIBYTE = 1 << 20


def num_blocks(
    kv_shapes: Sequence[KvShape],
    device: torch.device,
    dtype: torch.dtype,
    *,
    block_size: int,
    context_len: int,
    max_lanes: int,
    wanted: int | None,
    kv_memory: int | None,
) -> int:
    """Blocks to hold: ``wanted``, else what ``kv_memory`` bytes hold, else a share of the memory that is free.

    By default on CPU half of the free memory but at most 2 GiB, on CUDA 85%; more only where one whole context needs it
    and it is free, and never more than all lanes could fill. Raises ValueError when not one block fits.
    """
    per_block = block_bytes(kv_shapes, dtype, block_size)
    blocks_of_context = -(-context_len // block_size)
    if wanted is not None:
        chosen, why = wanted, "as asked"
    elif kv_memory is not None:
        chosen, why = kv_memory // per_block, f"of {kv_memory // _MEBIBYTE} MiB"
    else:
        free = free_bytes(device)
        share = int(free * (_DEFAULT_CUDA_SHARE if device.type == "cuda" else _DEFAULT_CPU_SHARE))
        usable = share if device.type == "cuda" else min(share, _DEFAULT_CPU_BYTES)
        chosen = max(usable // per_block, min(blocks_of_context, share // per_block))
        chosen, why = min(chosen, blocks_of_context * max_lanes), f"of {free // _MEBIBYTE} MiB free memory"
    chosen = min(chosen, MAX_BLOCKS)
    if chosen < 1:
        raise ValueError(f"no KV block fits: one needs {per_block} bytes")
    log.info(
        "%d KV blocks of %d tokens, %d MiB (%s): room for %.1f contexts of %d tokens",
        *(chosen, block_size, chosen * per_block // _MEBIBYTE, why, chosen / blocks_of_context, context_len),
    )
    return chosen


def block_bytes(kv_shapes: Sequence[KvShape], dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block in all layers."""
    return 2 * block_size * sum(num_heads * head_dim for num_heads, head_dim in kv_shapes) * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken now: the device's, or the host's within the limit of our control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    rooms = [_control_group_room(Path("/sys/fs/cgroup")), _host_room()]
    return min(room for room in rooms if room is not None)


def _host_room() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _control_group_room(root: Path) -> int | None:
    """Limit less use, as a container sees its own group (version 2, then 1); None without a limit."""
    for limit_file, use_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, used = (int((root / name).read_text()) for name in (limit_file, use_file))
        except (OSError, ValueError):  # absent, or "max"
            continue
        return max(0, limit - used)
    return None

"""Which device, number format and threads a model runs with. Called by the torch backend while it loads."""

import os
from pathlib import Path

import torch

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is a device. Raises ValueError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r} (known: auto, cpu, cuda)")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for, but there is no CUDA device")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the device computes it in hardware, else float32. Raises ValueError for others."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _has_bfloat16() else torch.float32
    if name not in _DTYPES:
        raise ValueError(f"unknown dtype {name!r} (known: auto, {', '.join(_DTYPES)})")
    return _DTYPES[name]


def set_threads(wanted: int | None) -> int:
    """Set torch's threads once for the process: ``wanted``, else one for each physical core we may run on."""
    threads = wanted or max(1, len(_physical_cores()))
    torch.set_num_threads(threads)
    return threads


def describe(device: torch.device) -> str:
    """The device in words: what a step's bits may depend on."""
    if device.type == "cuda":
        return f"cuda {torch.cuda.get_device_name(device)}"
    return f"cpu {torch.backends.cpu.get_cpu_capability()}" + (" bf16" if _has_bfloat16() else "")


def has_failed(device: torch.device) -> bool:
    """Whether the device computes nothing any more: what has failed on CUDA fails every later call, too."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _physical_cores() -> set[str]:
    """One entry for each core (hardware threads of one core name the same siblings)."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.is_file() else str(cpu))
    return cores

"""Weights of a model folder: memory-mapped safetensors, one file or many, checked by name and shape.

Called by ``llama``. Tensors are read when taken, so that a model never exists twice in memory.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

log = logging.getLogger(__name__)

_HARMLESS = ("rotary_emb.inv_freq", "rope_freqs.weight")
"""Endings of tensors that hold what the config says anyway."""
_PROGRESS_S = 2.0
"""Between two lines of progress."""
_SAMPLED_PLACES = 512
_SAMPLED_BYTES = 4096


class Weights:
    """The tensors of one model folder by name."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Open the folder's files. Raises ValueError, naming the file, when one is missing or broken.

        ``on_progress`` is told now and then how many of the tensors have been taken.
        """
        self._device, self._dtype = device, dtype
        self._on_progress, self._num_taken, self._told_at = on_progress, 0, time.monotonic()
        self._places = {}
        for file in weight_files(folder):
            try:
                opened = safe_open(file, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} cannot be read: {error}") from error
            for name in opened.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118 - not a dict
                self._places[name] = opened

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def check_names(self, expected: set[str]) -> None:
        """Raise ValueError naming what is missing; warn about what would be left over."""
        missing = sorted(expected - self._places.keys())
        if missing:
            raise ValueError(f"the weights lack {listed(missing)}")
        extra = sorted(name for name in self._places.keys() - expected if not name.endswith(_HARMLESS))
        if extra:
            log.warning("the weights hold tensors that this model does not use: %s", listed(extra))

    def take(self, name: str, *shape: int) -> Tensor:
        """One tensor, on the model's device in its dtype. Raises ValueError when its shape is another."""
        tensor: Tensor = self._places[name].get_tensor(name)  # type: ignore[no-untyped-call]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"tensor {name} has shape {tuple(tensor.shape)}, the config asks for {shape}")
        self._num_taken += 1
        if time.monotonic() - self._told_at > _PROGRESS_S:
            self._told_at = time.monotonic()
            self._on_progress(f"read {self._num_taken} of {len(self._places)} tensors")
        return tensor.to(device=self._device, dtype=self._dtype)


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files in a fixed order. Raises ValueError naming the one that is missing."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} cannot be read: {error}") from error
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing")
    return [folder / name for name in names]


def digest(files: list[Path]) -> str:
    """A hash that tells one set of weights from another without reading them whole.

    Covers each file's size, its header (names, shapes) and 4 kB at 512 evenly spaced places: any training or
    quantization moves nearly every weight, so two models that agree in all of them are the same.
    """
    state = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        state.update(size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            header_bytes = min(8 + int.from_bytes(opened.read(8), "little"), size)
            opened.seek(0)
            state.update(opened.read(header_bytes))
            for place in range(_SAMPLED_PLACES):
                opened.seek(header_bytes + (size - header_bytes) * place // _SAMPLED_PLACES)
                state.update(opened.read(_SAMPLED_BYTES))
    return state.hexdigest()


def listed(names: list[str]) -> str:
    """At most eight of ``names``, for a message."""
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"

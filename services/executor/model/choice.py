"""Which implementation serves a model folder: our own where we have written its architecture out, else transformers'.

Called by the torch backend.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from services.executor.kernels.interface import Kernels
from services.executor.model import config as native_config
from services.executor.model import hosted_config
from services.executor.model.config import ModelConfig
from services.executor.model.hosted_config import HostedConfig
from services.executor.model.llama import Llama
from services.executor.model.paged import PagedModel
from services.executor.model.weights import Weights

KernelsOf = Callable[[int], Kernels]
"""Chooses kernels for a head size."""


def read(folder: Path) -> ModelConfig | HostedConfig:
    """What ``folder``/config.json says. Raises ValueError, naming what it is, for what neither can compute."""
    raw = native_config.read_json(folder / "config.json")
    if (raw.get("architectures") or [None])[0] in native_config.ARCHITECTURES:
        return native_config.read(folder)
    return hosted_config.read(folder, raw)


def load(
    config: ModelConfig | HostedConfig,
    folder: Path,
    kernels_of: KernelsOf,
    device: torch.device,
    dtype: torch.dtype,
    context_len: int,
    on_progress: Callable[[str], None],
) -> tuple[PagedModel, Kernels]:
    """Load the model to serve ``context_len`` tokens at most. Raises ValueError when its weights do not fit it."""
    if isinstance(config, HostedConfig):
        from services.executor.model import hosted  # transformers' models take seconds to import

        return hosted.load(folder, config, kernels_of, device, dtype, context_len)
    kernels = kernels_of(config.head_dim)
    return Llama(config, Weights(folder, device, dtype, on_progress), kernels, device), kernels

"""Which kernels serve a model on a device: compiled ones where they can be had, plain torch everywhere else."""

import logging

import torch

from services.executor.kernels.cpu.build import NoCompilerError
from services.executor.kernels.cpu.kernels import CompiledKernels
from services.executor.kernels.cpu.library import supports
from services.executor.kernels.interface import Kernels
from services.executor.kernels.reference import ReferenceKernels

log = logging.getLogger(__name__)


def choose(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> Kernels:
    """The fastest kernels for this device, data type, head and block size. Says why when they are slow ones."""
    if device.type == "cpu":
        if not supports(head_dim, block_size, dtype):
            log.warning("plain torch kernels: head size %d, block size %d, %s", head_dim, block_size, dtype)
        else:
            try:
                return CompiledKernels()
            except NoCompilerError as error:
                log.warning("plain torch kernels, several times slower: %s", error)
    return ReferenceKernels(device)

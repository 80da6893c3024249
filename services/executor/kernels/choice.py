"""Which kernels serve a model on a device: compiled ones where they can be had, plain torch everywhere else."""

import logging

import torch

from services.executor.kernels.cpu import bindings
from services.executor.kernels.cpu.build import NoCompilerError
from services.executor.kernels.cpu.kernels import CompiledKernels
from services.executor.kernels.interface import Kernels, Quantization
from services.executor.kernels.reference import ReferenceKernels
from services.executor.kernels.triton.needs import missing

log = logging.getLogger(__name__)


def choose(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int, quantization: Quantization = "none"
) -> Kernels:
    """The fastest kernels for this device, data type, head and block size. Says why when they are slow ones.

    Raises ValueError for a quantization that the device's kernels do not know.
    """
    if device.type == "cuda":
        if quantization != "none":
            raise ValueError(f"quantization {quantization} is for CPUs; this executor runs on CUDA")
        return _cuda_kernels(device)
    if device.type == "cpu":
        if not bindings.supports(head_dim, block_size, dtype):
            log.warning(
                "plain torch kernels, several times slower: the compiled ones have no head size %d with block size %d "
                "(a multiple of 16 is needed) in %s",
                *(head_dim, block_size, dtype),
            )
        else:
            try:
                return CompiledKernels(quantization)
            except NoCompilerError as error:
                log.warning("plain torch kernels, several times slower: %s", error)
    return ReferenceKernels(device, quantization)


def padded_head_dim(device: torch.device, head_dim: int) -> int:
    """The head size to keep KV in, padded with zeros, so that the fastest kernels serve heads of ``head_dim``."""
    return bindings.padded_head_dim(head_dim) if device.type == "cpu" else head_dim + head_dim % 2


def _cuda_kernels(device: torch.device) -> Kernels:
    lacking = missing(torch.cuda.get_device_capability(device))
    if lacking is not None:
        log.warning("plain torch kernels, several times slower: Triton's need %s", lacking)
        return ReferenceKernels(device)
    from services.executor.kernels.triton.kernels import TritonKernels  # imports triton: only for a CUDA device

    return TritonKernels(device)

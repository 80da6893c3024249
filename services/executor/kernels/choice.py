"""Which kernels serve a model on a device: compiled ones where they can be had, plain torch everywhere else."""

import importlib.util
import logging
import os
import shutil

import torch

from services.executor.kernels.cpu.build import NoCompilerError
from services.executor.kernels.cpu.kernels import CompiledKernels
from services.executor.kernels.cpu.library import supports
from services.executor.kernels.interface import Kernels, Quantization
from services.executor.kernels.reference import ReferenceKernels

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
        if not supports(head_dim, block_size, dtype):
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


def _cuda_kernels(device: torch.device) -> Kernels:
    """Triton's, which are compiled when first used: with a C compiler, and for matrix units that know bfloat16."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if torch.cuda.get_device_capability(device) < (8, 0):
        log.warning("plain torch kernels, several times slower: this CUDA device is older than compute capability 8.0")
    elif compiler is None:
        log.warning("plain torch kernels, several times slower: Triton needs gcc or clang")
    elif importlib.util.find_spec("triton") is None:
        log.warning("plain torch kernels, several times slower: triton is not installed")
    else:
        from services.executor.kernels.triton.kernels import TritonKernels

        return TritonKernels(device)
    return ReferenceKernels(device)

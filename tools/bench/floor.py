"""The least time a step could take on this machine: its products alone, and its KV bytes at the speed of memory.

Called by ``tools.bench.step`` and ``kernels``. Imports torch and the executor's kernels.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from services.executor.kernels import linear
from services.executor.kernels.choice import choose
from services.executor.kernels.interface import Linear, Quantization

Shape = tuple[int, int]
"""[columns out, columns in]."""
_BUFFER_BYTES = 256 << 20
"""Several times any cache."""


def candidates(dtype: torch.dtype, quantization: Quantization) -> dict[str, Callable[[Tensor], Linear]]:
    """Ways to compute a product on this CPU, by name: ours and the libraries'. Weights are laid out once."""
    ours = choose(torch.device("cpu"), dtype, 64, 16, quantization)
    ways: dict[str, Callable[[Tensor], Linear]] = {"ours": lambda weight: ours.linear(weight, None)}
    if quantization == "int8":
        ways["oneDNN int8"] = _onednn_int8
        return ways
    ways["plain torch"] = lambda weight: lambda x: F.linear(x, weight)
    if linear.can_pack(torch.empty(1, 1, dtype=dtype)):
        ways["oneDNN packed"] = _onednn
    return ways


def _onednn(weight: Tensor) -> Linear:
    """As it is, without padding one row to two."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    product = torch.ops.mkldnn._linear_pointwise
    return lambda x: product(x, packed, None, "none", [], "")


def _onednn_int8(weight: Tensor) -> Linear:
    """The library's product of integers; quantizing the rows is left out, so that the floor is a low one."""
    columns = len(weight)
    packed = torch.ops.onednn.qlinear_prepack(torch.randint(-127, 128, weight.shape, dtype=torch.int8), None)
    scales, zeros = torch.rand(columns), torch.zeros(columns, dtype=torch.int64)
    product = torch.ops.onednn.qlinear_pointwise

    def run(x: Tensor) -> Tensor:
        quantized = torch.empty(x.shape, dtype=torch.uint8)
        result: Tensor = product(quantized, 0.1, 128, packed, scales, zeros, None, 1.0, 0, x.dtype, "none", [], "")
        return result

    return run


class Products:
    """All products of one model, each way, with weights of their own as the model has them: none is in a cache."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype, quantization: Quantization) -> None:
        self._shapes, self._dtype = shapes, dtype
        generator = torch.Generator().manual_seed(0)
        self.ways: dict[str, list[Linear]] = {
            name: [way(torch.randn(*shape, generator=generator).to(dtype)) for shape in shapes]
            for name, way in candidates(dtype, quantization).items()
        }

    def run(self, way: str, num_rows: int, num_sampled: int) -> float:
        """Seconds for all of them once: ``num_rows`` rows each, the last one (the logits) ``num_sampled``."""
        rows = {depth: torch.randn(num_rows, depth).to(self._dtype) for _, depth in self._shapes}
        last = rows[self._shapes[-1][1]][:num_sampled].clone()
        *products, logits = self.ways[way]
        began = time.perf_counter()
        for product, (_, depth) in zip(products, self._shapes, strict=False):
            product(rows[depth])
        if num_sampled:
            logits(last)
        return time.perf_counter() - began


class Memory:
    """Reads a buffer that fits no cache."""

    def __init__(self) -> None:
        self._buffer = torch.ones(_BUFFER_BYTES // 4)

    def run(self) -> float:
        """Seconds for a byte."""
        began = time.perf_counter()
        self._buffer.sum()
        return (time.perf_counter() - began) / _BUFFER_BYTES


def interleaved(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Medians of what each run returns, taken in turns, so that a disturbance of the machine meets them all."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            value = run()
            if turn:  # the first one warms up
                taken[name].append(value)
    return {name: statistics.median(values) for name, values in taken.items()}

"""How the operations of a library treat a row alike whatever other rows there are. Used by ``hosted``.

Three things make a row's bits depend on its neighbours in torch's operations on a CPU, and each is kept away:

- Products choose their order by the number of rows: ``InvariantLinear`` takes their place.
- Elementwise operations compute whole vectors by one formula and what is left at the end by another (SiLU, GELU, tanh,
  rsqrt differ in the last bit), and threads cut a tensor anywhere: rows come in multiples of 64, so that every tensor
  ends with a whole vector (two of 32 bfloat16 at most), and a single thread computes them. Sums over a row are then
  sums over that row alone too, and never the single row that torch would share out to threads.
- Cosines of large angles take another path for the whole vector: ``RotaryTable`` computes them once, for every
  position.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from services.executor.kernels.interface import Kernels, Linear

_MULTIPLE = 64


@dataclass
class StepRows:
    """How many rows a step has, and with padding."""

    device: torch.device
    threads: int
    """For products and attention, whose results do not depend on it."""
    real: int = 0
    total: int = 0

    def start(self, real: int) -> None:
        """A step of ``real`` rows begins."""
        self.real = real
        self.total = -(-real // _MULTIPLE) * _MULTIPLE if self.device.type == "cpu" else real

    def padded(self, rows: Tensor) -> Tensor:
        """``rows`` [real, ...] with rows of zeros behind."""
        padding = [0, 0] * (rows.ndim - 1) + [0, self.total - len(rows)]
        return F.pad(rows, padding) if padding[-1] else rows


@contextmanager
def one_thread(rows: StepRows) -> Iterator[None]:
    """Run what is between products on one thread."""
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(rows.threads)


@contextmanager
def all_threads(rows: StepRows) -> Iterator[None]:
    """Run a product or attention on all threads, inside of ``one_thread``. Takes less than a microsecond."""
    torch.set_num_threads(rows.threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)


class InvariantLinear(nn.Module):
    """Takes the place of a linear layer; computes the rows of the step and leaves padding rows zero."""

    def __init__(self, product: Linear, columns: int, rows: StepRows) -> None:
        super().__init__()
        self._product, self._columns, self._rows = product, columns, rows

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        rows = self._rows
        is_padded = len(flat) == rows.total
        with all_threads(rows):
            found = self._product((flat[: rows.real] if is_padded else flat).contiguous())
        found = rows.padded(found) if is_padded else found
        return found.view(*x.shape[:-1], self._columns)


class RotaryTable(nn.Module):
    """Takes the place of a rotary embedding; looks up what it gives for each position."""

    def __init__(self, inner: nn.Module, num_positions: int) -> None:
        super().__init__()
        self.inner, self._num_positions = inner, num_positions
        self._tables: dict[Any, tuple[Tensor, ...]] = {}

    def forward(self, x: Tensor, position_ids: Tensor, *which: Any, **named: Any) -> Any:
        """``which`` and ``named`` tell one of several embeddings (of a kind of layer, say)."""
        key = (which, tuple(named.items()))
        if key not in self._tables:
            every = torch.arange(self._num_positions, device=position_ids.device)[None]
            found = self.inner(x, every, *which, **named)
            self._tables[key] = found if isinstance(found, tuple) else (found,)
        turns = tuple(table[:, position_ids[0]] for table in self._tables[key])
        return turns if len(turns) > 1 else turns[0]


def replace(model: nn.Module, kernels: Kernels, rows: StepRows, num_positions: int) -> list[str]:
    """Put the invariant parts in place, one by one, so that weights are never held twice.

    Returns the kinds of what is left that may move with the number of rows: those that multiply by themselves.
    """
    left: set[str] = set()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear or type(child) is Conv1D:
                setattr(parent, name, _invariant(child, kernels, rows))
            elif type(child).__name__.endswith("RotaryEmbedding") and not isinstance(parent, RotaryTable):
                setattr(parent, name, RotaryTable(child, num_positions))
            elif not isinstance(child, nn.Embedding) and any(p.ndim > 1 for p in child.parameters(recurse=False)):
                left.add(type(child).__name__)
    return sorted(left)


def _invariant(layer: Any, kernels: Kernels, rows: StepRows) -> InvariantLinear:
    bias: Tensor | None = layer.bias
    weight: Tensor = layer.weight.detach()
    weight = weight.T.contiguous() if type(layer) is Conv1D else weight
    return InvariantLinear(kernels.linear(weight, None if bias is None else bias.detach()), len(weight), rows)

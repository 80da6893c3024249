"""How the operations of a library treat a row alike whatever other rows there are. Used by ``hosted``.

Three things make a row's bits depend on its neighbours in torch's operations on a CPU, and each is kept away:

- Products choose their order by the number of rows: ``InvariantLinear`` takes their place (experts: ``hosted_experts``,
  routers: ``hosted_weights``).
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

from services.executor.kernels.interface import Kernels

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
        self.total = whole(real) if self.device.type == "cpu" else real

    def padded(self, rows: Tensor) -> Tensor:
        """``rows`` [real, ...] with rows of zeros behind."""
        padding = [0, 0] * (rows.ndim - 1) + [0, self.total - len(rows)]
        return F.pad(rows, padding) if padding[-1] else rows

    def only_real(self, rows: Tensor) -> Tensor:
        """``rows`` [total, ...] without padding; anything else as it is."""
        return rows[: self.real] if len(rows) == self.total else rows


def whole(rows: int) -> int:
    """That many, or more, so that a tensor of as many rows ends with a whole vector."""
    return -(-rows // _MULTIPLE) * _MULTIPLE


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

    def __init__(
        self, weight: Tensor, bias: Tensor | None, kernels: Kernels, rows: StepRows, exact: bool = False
    ) -> None:
        """``weight`` [columns out, columns in]; ``exact`` as in ``interface.Kernels``."""
        super().__init__()
        self._product = kernels.linear(weight, bias, exact)
        self._columns, self._rows = len(weight), rows
        self.weight = weight.new_empty(0)
        """Tells its type to models that ask for it."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        real = self._rows.only_real(flat)
        with all_threads(self._rows):
            found = self._product(real.contiguous())
        found = self._rows.padded(found) if len(real) < len(flat) else found
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

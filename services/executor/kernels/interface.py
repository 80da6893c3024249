"""What the model asks of its kernels: the one seam between the model's mathematics and how fast it is done.

``reference`` implements it in plain torch; compiled CPU code and Triton implement it beside that and are checked
against it. Shape letters, as suffixes: T tokens of the step, H query heads, K key/value heads, D head size, C columns.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from services.executor.batch import StepBatch

Linear = Callable[[Tensor], Tensor]
"""[T, columns in] -> [T, columns out]: a product with weights that were laid out once, for this call alone."""


class LayerCache(NamedTuple):
    """One layer's KV memory. The token in slot ``block * block_size + offset`` is at ``[block, offset]``."""

    keys: Tensor
    """[num_blocks, block_size, K, D], contiguous."""
    values: Tensor
    """[num_blocks, block_size, K, D], contiguous."""


class StepAttention(Protocol):
    """Paged attention of one step: made once per step, used by every layer of it."""

    def write(self, keys_TKD: Tensor, values_TKD: Tensor, cache: LayerCache) -> None:
        """Store each token's key and value in its slot. No other slot changes."""

    def attend(self, queries_THD: Tensor, cache: LayerCache, scale: float, window: int) -> Tensor:
        """Attend causally to each row's context through its block table; returns [T, H, D].

        A query at position p sees positions max(0, p - window + 1)..p, or 0..p when ``window`` is 0. Slots outside a
        row's context are never part of a result, whatever they hold (NaN included).
        """
        ...


class Kernels(Protocol):
    """The operations of a forward pass whose implementation is chosen per device."""

    name: str
    """Part of the numerics fingerprint."""

    def step(self, batch: StepBatch, block_size: int) -> StepAttention:
        """Lay out one step's attention."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Prepare a product with ``weight`` [columns out, columns in]; ``weight`` itself is not needed afterwards."""
        ...

    def rms_norm(self, x_TC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
        """Root mean square normalisation over the last dimension, in float32 inside."""
        ...

    def rotate(self, heads_TND: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Rotary embedding in the half-split layout; ``cos`` and ``sin`` are float32 of half the head size."""
        ...

    def silu_mul(self, gate_up_TC: Tensor) -> Tensor:
        """silu(first half of the columns) * second half."""
        ...

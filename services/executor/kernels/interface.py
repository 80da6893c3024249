"""What the model asks of its kernels: the one seam between the model's mathematics and how fast it is done.

``reference`` implements it in plain torch; compiled CPU code and Triton implement it beside that and are checked
against it. Shape letters, as suffixes: T tokens of the step, H query heads, K key/value heads, X = H + 2 K,
D head size, C columns.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from services.executor.batch import StepBatch

Linear = Callable[[Tensor], Tensor]
"""[T, columns in] -> [T, columns out]: a product with weights that were laid out once, for this call alone."""


Quantization = Literal["none", "int8"]
"""How products keep their weights: as they are, or as integers with one scale a column, activations likewise a row."""


class LayerCache(NamedTuple):
    """One layer's KV memory, in a layout that only the kernels that made it know. Blocks are the first dimension."""

    keys: Tensor
    values: Tensor


class Rotary(NamedTuple):
    """Rotary embedding in the half-split layout, by absolute position."""

    cos: Tensor
    """[positions, D / 2] float32."""
    sin: Tensor
    """[positions, D / 2] float32."""


class QkNorm(NamedTuple):
    """RMS norms of each query and key head, applied before they are rotated."""

    query_D: Tensor
    key_D: Tensor
    eps: float


class StepAttention(Protocol):
    """Paged attention of one step: made once per step, used by every layer of it."""

    def rotate_and_write(
        self, qkv_TXD: Tensor, num_heads: int, rotary: Rotary | None, norm: QkNorm | None, cache: LayerCache
    ) -> Tensor:
        """Rotate queries and keys to their positions and store keys and values in their slots; no other slot changes.

        ``qkv`` holds H + 2 K heads: queries, keys, values. Without ``rotary`` nothing is rotated: the model has put the
        positions in, or has none there. Returns the queries [T, H, D].
        """
        ...

    def attend(self, queries_THD: Tensor, cache: LayerCache, scale: float, window: int) -> Tensor:
        """Attend causally to each row's context through its block table; returns [T, H, D].

        A query at position p sees positions max(0, p - window + 1)..p, or 0..p when ``window`` is 0. Slots outside a
        row's context are never part of a result, whatever they hold (NaN included).
        """
        ...


class DecoderLayer(NamedTuple):
    """One decoder layer. Products of the same input are one: q, k, v by columns, and gate before up."""

    input_norm_C: Tensor
    qkv: Linear
    qk_norm: QkNorm | None
    out: Linear
    mlp_norm_C: Tensor
    gate_up: Linear
    down: Linear
    window: int
    """Of its attention; see ``StepAttention.attend``."""


class DecoderShape(NamedTuple):
    """What is the same in all layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rotary: Rotary


class Decoder(Protocol):
    """All decoder layers of a model."""

    def __call__(self, residual_TC: Tensor, attention: StepAttention, caches: Sequence[LayerCache]) -> Tensor:
        """Pass a step's embedded tokens through the layers, writing their KV; one cache a layer.

        Returns what the last layer adds [T, C]; the sum of all before is left in ``residual``.
        """
        ...


class Kernels(Protocol):
    """The operations of a forward pass whose implementation is chosen per device."""

    name: str
    """Part of the numerics fingerprint."""
    quantization: Quantization

    def new_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> LayerCache:
        """KV memory of one layer, zeroed: on CPU that takes no memory until a page is first written."""
        ...

    def step(self, batch: StepBatch, block_size: int) -> StepAttention:
        """Lay out one step's attention."""
        ...

    def linear(self, weight: Tensor, bias: Tensor | None, exact: bool = False) -> Linear:
        """Prepare a product with ``weight`` [columns out, columns in]; ``weight`` itself is not needed afterwards.

        An ``exact`` one is never quantized.
        """
        ...

    def add_rms_norm(self, x_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float) -> Tensor:
        """RMS norm, float32 inside, of ``x``, or of ``residual += x`` (in place) where there is a residual."""
        ...

    def silu_mul(self, gate_up_TC: Tensor) -> Tensor:
        """silu(first half of the columns) * second half."""
        ...

    def decoder(self, layers: Sequence[DecoderLayer], shape: DecoderShape) -> Decoder:
        """Put layers together, of products that these kernels made: in one piece, or from the operations above."""
        ...

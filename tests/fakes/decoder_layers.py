"""Small decoder layers with random weights, for any kernels' products."""

from collections.abc import Callable

import torch

from services.executor.kernels.interface import DecoderLayer, DecoderShape, Linear, QkNorm, Rotary

HEADS, KV_HEADS, DIM, HIDDEN, INNER = 6, 2, 32, 96, 136
_ANGLES = torch.outer(torch.arange(400.0), 10000 ** (-torch.arange(0, DIM, 2) / DIM))
SHAPE = DecoderShape(HEADS, KV_HEADS, DIM, 1e-5, Rotary(_ANGLES.cos(), _ANGLES.sin()))
"""For positions below 400."""


def layers_of(
    linear: Callable[[torch.Tensor, torch.Tensor | None], Linear], dtype: torch.dtype, generator: torch.Generator
) -> list[DecoderLayer]:
    """Three layers, no two alike: with and without biases, norms of heads, a window."""

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.2).to(dtype)

    def layer(window: int, bias: bool, normed: bool) -> DecoderLayer:
        qkv = (HEADS + 2 * KV_HEADS) * DIM
        return DecoderLayer(
            1 + random(HIDDEN),
            linear(random(qkv, HIDDEN), random(qkv) if bias else None),
            QkNorm(1 + random(DIM), 1 + random(DIM), 1e-6) if normed else None,
            linear(random(HIDDEN, HEADS * DIM), random(HIDDEN) if bias else None),
            1 + random(HIDDEN),
            linear(random(2 * INNER, HIDDEN), None),
            linear(random(HIDDEN, INNER), None),
            window,
        )

    return [layer(0, bias=False, normed=True), layer(20, bias=True, normed=False), layer(0, bias=True, normed=True)]

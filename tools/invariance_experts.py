"""Layers of experts in ``make invariance``: a row's bits alone and in crowds, and what that costs.

Called by ``invariance``. The layer is one of Granite 3's with a billion weights, but random. Imports torch and
transformers.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteMoeConfig

from services.executor.kernels.choice import choose
from services.executor.kernels.interface import Quantization
from services.executor.model.hosted_replace import replace
from services.executor.model.hosted_rows import StepRows, one_thread
from tools.bench.floor import interleaved
from tools.invariance_rows import Finding, rowwise

_CPU = torch.device("cpu")
_WAYS = ("grouped_mm", "batched_mm", "eager")
"""transformers' own ways to compute experts."""
_CONFIG: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_local_experts": 32,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


class Layer:
    """The same layer as transformers computes it, and with our products."""

    def __init__(self, dtype: torch.dtype, quantization: Quantization) -> None:
        self.dtype = dtype
        self._theirs, self._ours = self._model(), self._model()
        self._rows = StepRows(_CPU, torch.get_num_threads())
        replace(self._ours, choose(_CPU, dtype, 64, 16, quantization), self._rows, 16)

    def _model(self) -> Any:
        torch.manual_seed(1)
        made: Any = AutoModelForCausalLM  # untyped
        return made.from_config(GraniteMoeConfig(**_CONFIG), dtype=self.dtype).eval()

    @torch.inference_mode()
    def ours(self, x_RC: Tensor) -> Tensor:
        """[R, hidden] -> [R, hidden], as a step has it."""
        self._rows.start(len(x_RC))
        with one_thread(self._rows):
            found: Tensor = _experts(self._ours)(self._rows.padded(x_RC)[None])
        return found[0, : len(x_RC)]

    @torch.inference_mode()
    def theirs(self, way: str, x_RC: Tensor) -> Tensor:
        """The same in one of transformers' ways."""
        self._theirs.set_experts_implementation(way)
        found: Tensor = _experts(self._theirs)(x_RC[None])
        return found[0]

    def some(self, rows: int) -> Tensor:
        """[rows, hidden]; every hundredth is of zeros, for which all experts tie."""
        x = torch.randn(rows, _CONFIG["hidden_size"]).to(self.dtype)
        x[::100] = 0
        return x


def check(layer: Layer, rows: int, draw: np.random.Generator) -> Finding:
    """Rows of one layer, router included."""
    return rowwise("layer of 32 experts", layer.ours, layer.some(rows), draw, turns=1)


def costs(layer: Layer) -> Iterator[str]:
    """Our time over transformers' fastest, one line a number of rows."""
    for rows in (1, 2, 8, 32):
        x = layer.some(rows)
        runs = {way: partial(_taken, partial(layer.theirs, way), x) for way in _WAYS}
        taken = interleaved(runs | {"ours": partial(_taken, layer.ours, x)}, 9)
        fastest = min(_WAYS, key=taken.__getitem__)
        ratio = taken["ours"] / taken[fastest]
        yield f"{rows:3} rows: {ratio:.2f} times transformers' {fastest} ({taken[fastest] * 1e3:.2f} ms)"


def _experts(model: Any) -> Any:
    return model.model.layers[0].block_sparse_moe


def _taken(run: Any, x: Tensor) -> float:
    began = time.perf_counter()
    run(x)
    return time.perf_counter() - began

"""Whether a model that was taken over computes what it did before: the same logits, whole and in pieces.

Called by ``hosted`` at every start. It is what finds out a model that keeps more of a sequence than keys and values, or
masks attention in a way that nothing tells: such a model gives other logits once a prompt comes in pieces.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.interface import Kernels
from services.executor.model.paged import PagedModel

_CUTS = (0, 10, 11, 24)
_BLOCK_SIZE = 16
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}
"""Largest distance of the logits, over their length. Rounding stays far below, a mistake in attention far above."""
_QUANTIZED = 0.3
_CHOICES = 0.2
"""Added where rounding may make a router choose another expert, which moves all logits of a token."""


class Check:
    """What transformers itself computes of some tokens, before anything is taken over."""

    def __init__(self, model: Any, vocab_size: int, context_len: int, device: torch.device) -> None:
        self._chooses = any("Experts" in type(module).__name__ for module in model.modules())
        self._cuts = [min(cut, context_len) for cut in _CUTS]
        self._token_ids = np.random.default_rng(5).integers(0, vocab_size, self._cuts[-1]).astype(np.int32)
        with torch.inference_mode():
            ids = torch.from_numpy(self._token_ids).long().to(device)[None]
            self._expected: Tensor = model(input_ids=ids, use_cache=False).logits[0].float()

    def compare(self, model: PagedModel, kernels: Kernels, dtype: torch.dtype) -> None:
        """Raises ValueError when ``model`` computes something else."""
        with torch.inference_mode():
            caches = [kernels.new_cache(2, _BLOCK_SIZE, *shape, dtype) for shape in model.kv_shapes]
            found = []
            for start, end in zip(self._cuts, self._cuts[1:], strict=False):
                if end > start:
                    states = model.states(self._piece(start, end), caches, _BLOCK_SIZE)
                    found.append(model.logits(states, np.arange(end - start)))
        logits = torch.cat(found)
        distance = float((logits - self._expected).norm() / self._expected.norm())
        allowed = max(_TOLERANCE[dtype], _QUANTIZED if kernels.quantization != "none" else 0.0)
        if self._chooses and allowed > _TOLERANCE[torch.float32]:
            allowed += _CHOICES
        if not distance <= allowed:
            raise ValueError(
                f"with paged attention it computes something else (logits differ by {distance:.1%}): "
                "it masks attention, or keeps more of a sequence, in a way that is not supported"
            )

    def _piece(self, start: int, end: int) -> StepBatch:
        """One row that computes tokens start..end - 1, in blocks 0 and 1."""
        positions = np.arange(start, end, dtype=np.int32)
        return StepBatch(
            step=0,
            lanes=[0],
            token_ids=self._token_ids[start:end],
            positions=positions,
            slot_mapping=positions.astype(np.int64),
            query_starts=np.array([0, end - start], np.int32),
            context_lens=np.array([end], np.int32),
            block_tables=np.arange(-(-end // _BLOCK_SIZE), dtype=np.int32)[None],
            samples=[],
        )

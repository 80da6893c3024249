"""What the torch backend asks of a model, whoever wrote it: ours (``llama``) or one of transformers' (``hosted``)."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.interface import LayerCache


class KvShape(NamedTuple):
    """What one layer keeps of a token: a key and a value for each of ``num_heads``, ``head_dim`` numbers each."""

    num_heads: int
    head_dim: int


class States(NamedTuple):
    """Every token of a step after the last layer: the sum of the two, [T, hidden]."""

    added: Tensor | None
    residual: Tensor


class PagedModel(Protocol):
    """A loaded model. Holds weights, never a request's state."""

    kv_shapes: list[KvShape]
    """One for each layer that attends."""

    @property
    def batch_dependent(self) -> list[str]:
        """Parts of the model whose bits may move with what else is in a step; none in most."""
        ...

    def states(
        self, batch: StepBatch, caches: list[LayerCache], block_size: int, before: Tensor | None = None
    ) -> States:
        """Compute the step's tokens, writing their KV; ``before`` are those to feed from (see ``kernels.feed``)."""
        ...

    def logits(self, states: States, tokens: NDArray[np.integer[Any]]) -> Tensor:
        """float32 logits [P, vocabulary] of P of the step's tokens, by their index 0..T-1."""
        ...

"""Decode steps captured as CUDA graphs: launching some three hundred kernels costs more than a small model computes.

Called by the torch backend on CUDA. A step of one token a row is padded to the next size that was captured. A padding
row has no slot, so it writes nothing, and no context, so it reads nothing; the other rows' bits are those of a step
that was not captured, since no kernel's arithmetic depends on the number of rows.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.feed import feed
from services.executor.kernels.interface import LayerCache
from services.executor.kernels.triton.kernels import StepColumns, TritonAttention, TritonKernels
from services.executor.kernels.triton.tiles import SEGMENT, Tiles
from services.executor.kernels.upload import upload
from services.executor.model.llama import Llama
from services.executor.model.paged import States

_MAX_CONTEXT = 32768
"""Longest context in a captured step: scratch memory is captured for it. Attention outweighs launching long before."""
_ROWS = (1, 2, 4, 8)
_MORE_ROWS = 16


class DecodeGraphs:
    """The captured steps of one model. They share their inputs and, one after the other, their memory."""

    def __init__(
        self,
        model: Llama,
        kernels: TritonKernels,
        caches: list[LayerCache],
        block_size: int,
        max_rows: int,
        context_len: int,
    ) -> None:
        """Captures nothing yet: see ``capture``. ``max_rows`` are the lanes of the executor."""
        self._model, self._kernels, self._caches, self._block_size = model, kernels, caches, block_size
        self._sizes = sizes(max_rows)
        longest = min(context_len, _MAX_CONTEXT)
        self._max_segments = -(-longest // SEGMENT)
        most, device = max(_MORE_ROWS, self._sizes[-1]), kernels.device
        self._scalars = torch.zeros(3, most, dtype=torch.int32, device=device)
        """Token ids, positions, context lengths."""
        self._slots = torch.full((most,), -1, dtype=torch.int64, device=device)
        self._tables = torch.zeros(most, -(-longest // block_size), dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._replays: dict[int, Callable[[], States]] = {}

    def capture(self) -> None:
        """Capture every size, the largest first: the others then need no memory of their own."""
        pool: Any = torch.cuda.graph_pool_handle() if self._kernels.device.type == "cuda" else None
        for size in reversed(self._sizes):
            self._replays[size] = _captured(self._step(size), pool)

    def states(self, batch: StepBatch, before: Tensor | None = None) -> States | None:
        """What ``Llama.states`` returns, with padding rows behind; None for a step that is none of those captured.

        Valid until the next step is launched, for what was launched before it: the inputs of all steps are the same
        memory, which the device writes between one step and the next.
        """
        num_rows, width = batch.block_tables.shape
        if len(batch.token_ids) > num_rows or num_rows > self._sizes[-1] or width > self._tables.shape[1]:
            return None
        size = next(size for size in self._sizes if size >= num_rows)
        scalars = np.zeros(self._scalars.shape, np.int32)
        scalars[:, :num_rows] = batch.token_ids, batch.positions, batch.context_lens
        moved = upload((scalars, _padded(batch.slot_mapping, size), batch.block_tables), self._kernels.device)
        for static, fresh in zip(
            (self._scalars, self._slots[:size], self._tables[:num_rows, :width]), moved, strict=True
        ):
            static.copy_(fresh)
        feed(self._scalars[0, :num_rows], batch, before)
        return self._replays[size]()

    def _step(self, size: int) -> Callable[[], States]:
        token_ids, positions, context_lens = self._scalars[:, :size]
        rows = self._starts[:size]
        tiles = Tiles(torch.stack([rows, rows * 0, rows], 1), rows, context_lens, self._max_segments)
        columns = StepColumns(
            positions, self._slots[:size], self._starts[: size + 1], context_lens, self._tables[:size]
        )
        attention = TritonAttention(columns, lambda group: tiles, self._kernels.num_processors)
        return lambda: self._model.through(token_ids, attention, self._caches)


def sizes(max_rows: int) -> list[int]:
    """Numbers of rows to capture, ascending; the last is at least ``max_rows``."""
    more = range(_MORE_ROWS, max_rows + _MORE_ROWS, _MORE_ROWS)
    return [size for size in (*_ROWS, *more) if size < max_rows] + [min(s for s in (*_ROWS, *more) if s >= max_rows)]


def _padded(slots: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return np.concatenate([slots, np.full(size - len(slots), -1, np.int64)])


def _captured(run: Callable[[], States], pool: Any) -> Callable[[], States]:
    """``run`` as a graph; itself where there is no CUDA, which is how the padding is tested without."""
    if pool is None:
        return run
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()  # kernels are compiled and loaded now: neither may happen while capturing
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        states = run()

    def replay(_kept: Callable[[], States] = run) -> States:  # the graph reads tensors that only ``run`` holds
        graph.replay()
        return states

    return replay

"""Our paged attention as transformers' models call it, through the one function its attention interface asks for.

Called by ``hosted``. A model is first run once with ``Probe`` in every module: it learns which modules attend, in which
order and shape, and refuses what our kernels do not compute. Each of those modules then gets a ``PagedLayer``.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from services.executor.kernels.interface import LayerCache, StepAttention
from services.executor.model.hosted_rows import StepRows, all_threads
from services.executor.model.paged import KvShape

NAME = "paternoster"
"""Of our attention in transformers' registry. No mask is registered under it, so transformers builds none."""
_HARMLESS = {"dropout", "is_causal", "position_ids", "position_embeddings", "output_attentions", "use_cache", "cache"}
"""Settings of an attention call that do not change what causal attention computes for a whole model in a row."""
_PLACE = "paged_place"


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """[1, H, T, D], [1, K, T, D], [1, K, T, E] -> [1, T, H, E]; what transformers calls an attention function."""
    return getattr(module, _PLACE).attend(module, query, key, value, attention_mask, settings), None


AttentionInterface.register(NAME, _attend)


@dataclass
class Attending:
    """One module that attends, as it was seen doing it."""

    module: nn.Module
    num_heads: int
    kv: KvShape
    """``head_dim`` is the larger of the keys' and the values'."""
    window: int


class Probe:
    """Stands in for attention once, in every module of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[Attending] = []
        for module in model.modules():
            setattr(module, _PLACE, self)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        settings: dict[str, Any],
    ) -> Tensor:
        """Note the call; zeros stand for its result. Raises ValueError for what our attention does not compute."""
        kind = type(module).__name__
        asked = {name for name, setting in settings.items() if setting is not None} - _HARMLESS
        unknown = sorted(asked - {"scaling", "sliding_window"})
        if unknown:
            raise ValueError(f"{kind} asks attention for {', '.join(unknown)}, which is not supported")
        if settings.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise ValueError(f"{kind} looks ahead, which is not supported")
        if mask is not None:
            raise ValueError(f"{kind} masks attention by itself (ALiBi, say), which is not supported")
        if any(known.module is module for known in self.seen):
            raise ValueError(f"{kind} attends more than once for a token, which is not supported")
        kv = KvShape(key.shape[1], max(key.shape[3], value.shape[3]))
        self.seen.append(Attending(module, query.shape[1], kv, settings.get("sliding_window") or 0))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


@dataclass
class Step:
    """What every layer shares of the step that runs."""

    rows: StepRows
    attention: StepAttention | None = None
    caches: list[LayerCache] = field(default_factory=list)


class PagedLayer:
    """Attention of one module, with the KV memory of layer ``index``, whose heads may be wider than the module's."""

    def __init__(self, index: int, head_dim: int, step: Step) -> None:
        self._index, self._head_dim, self._step = index, head_dim, step

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        settings: dict[str, Any],
    ) -> Tensor:
        """See ``_attend``. Heads are widened with zeros, which change neither a product nor a sum."""
        step, num_heads = self._step, query.shape[1]
        assert step.attention is not None
        assert mask is None
        scale = settings.get("scaling")
        scale = query.shape[3] ** -0.5 if scale is None else scale
        heads = torch.cat([self._heads(part) for part in (query, key, value)], dim=1)
        cache = step.caches[self._index]
        with all_threads(step.rows):
            queries = step.attention.rotate_and_write(heads, num_heads, None, None, cache)
            found = step.attention.attend(queries.contiguous(), cache, scale, settings.get("sliding_window") or 0)
        return step.rows.padded(found[:, :, : value.shape[3]])[None]

    def _heads(self, part: Tensor) -> Tensor:
        """[1, heads, rows, D] -> [T, heads, our head size], without the padding rows."""
        real = part[0, :, : self._step.rows.real].transpose(0, 1)
        return F.pad(real, (0, self._head_dim - real.shape[2]))


def give_places(seen: list[Attending], head_dims: list[int], step: Step) -> None:
    """Let every module that attends do it with our kernels from now on."""
    for index, (attending, head_dim) in enumerate(zip(seen, head_dims, strict=True)):
        setattr(attending.module, _PLACE, PagedLayer(index, head_dim, step))

"""Rotary scaling: which kinds a config may name, under which keys, and what they mean for what is served.

Called by ``config`` and ``hosted_config``. A kind that nobody knows must stop the start: transformers would fall back
to none for it.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TYPES = ("default", *ROPE_INIT_FUNCTIONS)


def check(raw: dict[str, Any], known: Collection[str]) -> None:
    """Raise ValueError naming a kind of scaling in config.json that is not ``known``."""
    for rope_type in types_of(raw):
        if rope_type not in known:
            raise ValueError(f"unsupported rotary scaling {rope_type!r} (supported: {', '.join(known)})")


def types_of(raw: dict[str, Any]) -> Iterator[str]:
    """Every kind that a config.json names: one for all layers, or one for each kind of layer."""
    for key in ("rope_parameters", "rope_scaling"):
        named: dict[str, Any] = raw.get(key) or {}
        for group in [group for group in named.values() if isinstance(group, dict)] or [named]:
            yield str(group.get("rope_type", group.get("type", "default")))
    if isinstance(raw.get("text_config"), dict):
        yield from types_of(raw["text_config"])


def context_len(config: Any, trained: int) -> int:
    """How many of the ``trained`` positions have the same frequencies, whatever the length of a sequence.

    Past its original length longrope takes other ones, for tokens whose KV is in the cache already too. ``dynamic``
    does so past ``trained`` only, which is never served.
    """
    settings = getattr(config, "rope_parameters", None) or {}
    if settings.get("rope_type") == "longrope":
        return min(trained, int(settings["original_max_position_embeddings"]))
    return trained


def frequencies(config: Any, head_dim: int) -> tuple[tuple[float, ...], float]:
    """[head_dim / 2] radians per position, and the factor of cosine and sine. ``config`` is transformers'."""
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        turns, scale = 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    else:
        turns, scale = ROPE_INIT_FUNCTIONS[rope_type](config)
    return tuple(turns.tolist()), float(scale)

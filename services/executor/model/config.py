"""What a model folder's config.json says, reduced to what our implementation needs and refused where it cannot do it.

Called by the torch backend. transformers supplies each architecture's defaults and reads both spellings of the rotary
settings; nothing of it outlives this module.
"""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from services.executor.model import rope

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_TYPES = tuple(kind for kind in rope.TYPES if kind != "proportional")
"""Proportional scaling turns a part of each head."""


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    """Positions the model was trained for (see ``rope.context_len``)."""
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    """Per layer: how many positions a query sees, its own included; 0 is all."""
    rope_frequencies: tuple[float, ...]
    """[head_dim / 2] radians per position."""
    rope_scale: float
    """Factor of cosine and sine."""


def read(folder: Path) -> ModelConfig:
    """Read ``folder``/config.json. Raises ValueError, naming what it is, for anything we cannot compute."""
    raw = read_json(folder / "config.json")
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"unsupported architecture {architecture} (supported: {', '.join(ARCHITECTURES)})")
    rope.check(raw, _ROPE_TYPES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises whatever a bad value leads to
        raise ValueError(f"{folder / 'config.json'} cannot be read: {error}") from error
    if config.hidden_act != "silu":
        raise ValueError(f"unsupported activation {config.hidden_act!r} (supported: 'silu')")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if (config.rope_parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("unsupported partial_rotary_factor: only whole heads are rotated")
    frequencies, rope_scale = rope.frequencies(config, head_dim)
    attention_bias = bool(getattr(config, "attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        context_len=rope.context_len(config, config.max_position_embeddings),
        norm_eps=config.rms_norm_eps,
        tied_embeddings=bool(config.tie_word_embeddings),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        out_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(config, architecture),
        rope_frequencies=frequencies,
        rope_scale=rope_scale,
    )


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError, naming the file, for anything else."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} is not a JSON object")
    return raw


def _windows(config: Any, architecture: str) -> tuple[int, ...]:
    window = int(getattr(config, "sliding_window", None) or 0)
    if architecture == "LlamaForCausalLM":
        window = 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None or architecture == "MistralForCausalLM":
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

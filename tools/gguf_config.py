"""What a GGUF file says of its model and transformers does not read: rotary scaling, biases, Gemma's scale of scores.

Called by ``gguf_model`` with the config that transformers makes of the metadata. Whatever says how to compute and is
neither known here nor there stops the conversion: a model that is almost right is worse than none.
"""

from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

ROPE_FACTORS = "rope_freqs.weight"
"""[head_dim / 2] what each frequency is divided by; how Llama 3.1's scaling is stored."""
_GEMMA3_27B_LAYERS = 62
"""The one size that scales scores by hidden size over heads, not by the head size (llama.cpp, src/llama-model.cpp)."""


def complete(config: Any, reader: GGUFReader) -> None:
    """Put what is missing into ``config``. Raises ValueError naming what cannot be told by one."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    kind = architecture(reader)
    _scale_rotary(config, _rotary_scaling(reader, kind, config, tensors))
    if kind == "llama":
        config.attention_bias = "blk.0.attn_q.bias" in tensors
        config.mlp_bias = "blk.0.ffn_down.bias" in tensors
    if kind == "gemma3":
        is_27b = config.num_hidden_layers == _GEMMA3_27B_LAYERS
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim


def architecture(reader: GGUFReader) -> str:
    """The file's own name for its kind of model."""
    return str(_value(reader, "general.architecture"))


def _rotary_scaling(reader: GGUFReader, prefix: str, config: Any, tensors: dict[str, Any]) -> dict[str, Any] | None:
    """In transformers' words; None without any."""
    if ROPE_FACTORS in tensors:
        tensor = tensors[ROPE_FACTORS]
        factors = dequantize(tensor.data, tensor.tensor_type).astype(np.float64).tolist()
        if all(factor == 1.0 for factor in factors):
            return None
        trained = config.max_position_embeddings
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": trained,
        }
    kind = _value(reader, f"{prefix}.rope.scaling.type") or "none"
    factor = _value(reader, f"{prefix}.rope.scaling.factor") or _value(reader, f"{prefix}.rope.scale_linear")
    if kind == "none" and factor in (None, 1.0):
        return None
    if kind in ("linear", "none") and factor is not None:
        return {"rope_type": "linear", "factor": float(factor)}
    original = _value(reader, f"{prefix}.rope.scaling.original_context_length")
    if kind == "yarn" and factor is not None and original is not None:
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": int(original)}
    raise ValueError(f"rotary scaling {kind!r} of factor {factor} and original context {original} is not supported")


def _scale_rotary(config: Any, scaling: dict[str, Any] | None) -> None:
    """All layers, or Gemma's that see the whole context."""
    if scaling is None:
        return
    parameters = config.rope_parameters
    if "full_attention" in parameters:
        parameters = parameters | {"full_attention": parameters["full_attention"] | scaling}
    else:
        parameters = parameters | scaling
    config.rope_parameters = parameters


def _value(reader: GGUFReader, key: str) -> Any:
    return reader.fields[key].contents() if key in reader.fields else None

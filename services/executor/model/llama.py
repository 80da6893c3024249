"""The llama family, on paged KV memory: Llama, SmolLM, Mistral, Qwen2 and Qwen3.

Called by the torch backend. One forward pass computes a whole step: prefill chunks and decodes of any number of
requests are T tokens in a row, and only attention knows where one request ends and the next begins.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.interface import Kernels, LayerCache, Linear, StepAttention
from services.executor.model.config import ModelConfig
from services.executor.model.weights import Weights


@dataclass(frozen=True)
class _Layer:
    """One decoder layer. Products of the same input are fused: q, k, v by rows, and gate above up."""

    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """A loaded model. Holds weights, never a request's state."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, device: torch.device) -> None:
        """Raises ValueError when the weights do not fit the config."""
        self._config, self._kernels, self._device = config, kernels, device
        weights.check_names(_names(config, weights))
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [self._layer(weights, f"model.layers.{index}.") for index in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", config.hidden_size)
        head = self._embedding
        if not config.tied_embeddings:
            head = weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = kernels.linear(head, None)
        positions = torch.arange(config.context_len, dtype=torch.float32)
        angles = torch.outer(positions, torch.tensor(config.rope_frequencies))
        self._cos = (angles.cos() * config.rope_scale).to(device)
        self._sin = (angles.sin() * config.rope_scale).to(device)

    def forward(self, batch: StepBatch, caches: list[LayerCache], block_size: int) -> Tensor:
        """Compute the step's tokens, writing their KV; returns float32 logits [S, vocabulary] of the sampled rows."""
        attention = self._kernels.step(batch, block_size)
        positions = torch.as_tensor(batch.positions, device=self._device)
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = F.embedding(torch.as_tensor(batch.token_ids, device=self._device), self._embedding)
        for layer, cache, window in zip(self._layers, caches, self._config.windows, strict=True):
            hidden = hidden + self._attend(layer, hidden, attention, cache, window, cos, sin)
            normed = self._kernels.rms_norm(hidden, layer.mlp_norm, self._config.norm_eps)
            hidden = hidden + layer.down(self._kernels.silu_mul(layer.gate_up(normed)))
        last = [int(batch.query_starts[sample.row + 1]) - 1 for sample in batch.samples]
        if not last:
            return torch.empty(0, self._config.vocab_size, device=self._device)
        sampled = hidden[torch.as_tensor(np.asarray(last), device=self._device)]
        return self._head(self._kernels.rms_norm(sampled, self._norm, self._config.norm_eps)).float()

    def _attend(
        self,
        layer: _Layer,
        hidden: Tensor,
        attention: StepAttention,
        cache: LayerCache,
        window: int,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        config, kernels = self._config, self._kernels
        num_tokens, num_heads, num_kv_heads = len(hidden), config.num_heads, config.num_kv_heads
        normed = kernels.rms_norm(hidden, layer.input_norm, config.norm_eps)
        qkv = layer.qkv(normed).view(num_tokens, num_heads + 2 * num_kv_heads, config.head_dim)
        rotating, values = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
        if layer.q_norm is not None and layer.k_norm is not None:
            queries = kernels.rms_norm(rotating[:, :num_heads], layer.q_norm, config.norm_eps)
            keys = kernels.rms_norm(rotating[:, num_heads:], layer.k_norm, config.norm_eps)
            rotating = torch.cat((queries, keys), dim=1)
        rotated = kernels.rotate(rotating, cos, sin)
        attention.write(rotated[:, num_heads:], values, cache)
        found = attention.attend(rotated[:, :num_heads], cache, config.head_dim**-0.5, window)
        return layer.out(found.view(num_tokens, num_heads * config.head_dim))

    def _layer(self, weights: Weights, prefix: str) -> _Layer:
        config = self._config
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        queries, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
        norms = ("self_attn.q_norm.weight", "self_attn.k_norm.weight") if config.qk_norm else ()
        q_norm, k_norm = [weights.take(prefix + name, head_dim) for name in norms] or (None, None)

        def linear(names: dict[str, int], columns: int, bias: bool) -> Linear:
            weight = torch.cat([weights.take(f"{prefix}{name}.weight", rows, columns) for name, rows in names.items()])
            biases = [weights.take(f"{prefix}{name}.bias", rows) for name, rows in names.items()] if bias else []
            return self._kernels.linear(weight, torch.cat(biases) if biases else None)

        return _Layer(
            input_norm=weights.take(prefix + "input_layernorm.weight", hidden),
            qkv=linear(
                {"self_attn.q_proj": queries, "self_attn.k_proj": kv, "self_attn.v_proj": kv}, hidden, config.qkv_bias
            ),
            q_norm=q_norm,
            k_norm=k_norm,
            out=linear({"self_attn.o_proj": hidden}, queries, config.out_bias),
            mlp_norm=weights.take(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
            down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
        )


def _names(config: ModelConfig, weights: Weights) -> set[str]:
    """Every tensor the model needs, and a tied model's needless copy of its embeddings where there is one."""
    layer = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    layer += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    layer += [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    layer += [f"self_attn.{name}_proj.bias" for name in "qkv" if config.qkv_bias]
    layer += ["self_attn.o_proj.bias"] if config.out_bias else []
    layer += [f"mlp.{name}_proj.bias" for name in ("gate", "up", "down") if config.mlp_bias]
    layer += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if config.qk_norm else []
    names = {f"model.layers.{index}.{name}" for index in range(config.num_layers) for name in layer}
    if not config.tied_embeddings or "lm_head.weight" in weights:
        names.add("lm_head.weight")
    return names | {"model.embed_tokens.weight", "model.norm.weight"}

"""The llama family, on paged KV memory: Llama, SmolLM, Mistral, Qwen2 and Qwen3.

Called by the torch backend. One forward pass computes a whole step: prefill chunks and decodes of any number of
requests are T tokens in a row, and only attention knows where one request ends and the next begins.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.interface import Kernels, LayerCache, Linear, QkNorm, Rotary, StepAttention
from services.executor.kernels.upload import upload
from services.executor.model.config import ModelConfig
from services.executor.model.paged import KvShape, States
from services.executor.model.weights import Weights


@dataclass(frozen=True)
class _Layer:
    """One decoder layer. Products of the same input are fused: q, k, v by rows, and gate above up."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: QkNorm | None
    out: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """A loaded model of ours; see ``paged.PagedModel``."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, device: torch.device) -> None:
        """Raises ValueError when the weights do not fit the config."""
        self._config, self._kernels, self._device = config, kernels, device
        self.kv_shapes = [KvShape(config.num_kv_heads, config.head_dim)] * config.num_layers
        self.batch_dependent: list[str] = []
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
        self._rotary = Rotary(*((turn * config.rope_scale).to(device) for turn in (angles.cos(), angles.sin())))

    def forward(self, batch: StepBatch, caches: list[LayerCache], block_size: int) -> Tensor:
        """Compute the step's tokens, writing their KV; returns float32 logits [S, vocabulary] of the sampled rows."""
        states = self.states(batch, caches, block_size)
        return self.logits(states, batch.query_starts[[sample.row + 1 for sample in batch.samples]] - 1)

    def states(self, batch: StepBatch, caches: list[LayerCache], block_size: int) -> States:
        """Compute the step's tokens, writing their KV; returns what they are before the last norm."""
        (token_ids,) = upload([batch.token_ids], self._device)
        return self.through(token_ids, self._kernels.step(batch, block_size), caches)

    def through(self, token_ids: Tensor, attention: StepAttention, caches: list[LayerCache]) -> States:
        """The same for what is on the device already; waits for nothing there, so that CUDA can capture it."""
        kernels, eps = self._kernels, self._config.norm_eps
        residual = F.embedding(token_ids, self._embedding)
        added: Tensor | None = None
        for layer, cache, window in zip(self._layers, caches, self._config.windows, strict=True):
            normed = self._norm_sum(added, residual, layer.input_norm)
            added = layer.out(self._attend(layer, layer.qkv(normed), attention, cache, window))
            normed = kernels.add_rms_norm(added, residual, layer.mlp_norm, eps)
            added = layer.down(kernels.silu_mul(layer.gate_up(normed)))
        return States(added, residual)

    def logits(self, states: States, tokens: NDArray[np.integer[Any]]) -> Tensor:
        """float32 logits [P, vocabulary] of P of the step's tokens, by their index 0..T-1."""
        if not len(tokens):
            return torch.empty(0, self._config.vocab_size, device=self._device)
        (rows,) = upload([tokens], self._device)
        added = None if states.added is None else states.added[rows]
        return self._head(self._norm_sum(added, states.residual[rows], self._norm)).float()

    def _norm_sum(self, added: Tensor | None, residual: Tensor, weight: Tensor) -> Tensor:
        """The norm of ``residual += added``; before the first layer there is nothing to add."""
        eps = self._config.norm_eps
        if added is None:
            return self._kernels.add_rms_norm(residual, None, weight, eps)
        return self._kernels.add_rms_norm(added, residual, weight, eps)

    def _attend(self, layer: _Layer, qkv: Tensor, attention: StepAttention, cache: LayerCache, window: int) -> Tensor:
        config = self._config
        num_tokens, head_dim = len(qkv), config.head_dim
        heads = qkv.view(num_tokens, config.num_heads + 2 * config.num_kv_heads, head_dim)
        queries = attention.rotate_and_write(heads, config.num_heads, self._rotary, layer.qk_norm, cache)
        found = attention.attend(queries, cache, head_dim**-0.5, window)
        return found.view(num_tokens, config.num_heads * head_dim)

    def _layer(self, weights: Weights, prefix: str) -> _Layer:
        config = self._config
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        queries, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
        qk_norm = None
        if config.qk_norm:
            query, key = (weights.take(f"{prefix}self_attn.{name}_norm.weight", head_dim) for name in "qk")
            qk_norm = QkNorm(query, key, config.norm_eps)

        def linear(names: dict[str, int], columns: int, bias: bool) -> Linear:
            weight = torch.cat([weights.take(f"{prefix}{name}.weight", rows, columns) for name, rows in names.items()])
            biases = [weights.take(f"{prefix}{name}.bias", rows) for name, rows in names.items()] if bias else []
            return self._kernels.linear(weight, torch.cat(biases) if biases else None)

        return _Layer(
            input_norm=weights.take(prefix + "input_layernorm.weight", hidden),
            qkv=linear(
                {"self_attn.q_proj": queries, "self_attn.k_proj": kv, "self_attn.v_proj": kv}, hidden, config.qkv_bias
            ),
            qk_norm=qk_norm,
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

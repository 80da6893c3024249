"""The llama family, on paged KV memory: Llama, SmolLM, Mistral, Qwen2 and Qwen3.

Called by the torch backend. One forward pass computes a whole step: prefill chunks and decodes of any number of
requests are T tokens in a row, and only attention knows where one request ends and the next begins.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.executor.batch import StepBatch
from services.executor.kernels.feed import feed
from services.executor.kernels.interface import (
    DecoderLayer,
    DecoderShape,
    Kernels,
    LayerCache,
    Linear,
    QkNorm,
    Rotary,
    StepAttention,
)
from services.executor.kernels.upload import upload
from services.executor.model.config import ModelConfig
from services.executor.model.paged import KvShape, States
from services.executor.model.weights import Weights


class Llama:
    """A loaded model of ours; see ``paged.PagedModel``."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels, device: torch.device) -> None:
        """Raises ValueError when the weights do not fit the config."""
        self._config, self._kernels, self._device = config, kernels, device
        self.kv_shapes = [KvShape(config.num_kv_heads, config.head_dim)] * config.num_layers
        self.batch_dependent: list[str] = []
        weights.check_names(_names(config, weights))
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [self._layer(weights, f"model.layers.{index}.", window) for index, window in enumerate(config.windows)]
        self._norm = weights.take("model.norm.weight", config.hidden_size)
        head = self._embedding
        if not config.tied_embeddings:
            head = weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = kernels.linear(head, None)
        positions = torch.arange(config.context_len, dtype=torch.float32)
        angles = torch.outer(positions, torch.tensor(config.rope_frequencies))
        rotary = Rotary(*((turn * config.rope_scale).to(device) for turn in (angles.cos(), angles.sin())))
        shape = DecoderShape(config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps, rotary)
        self._decoder = kernels.decoder(layers, shape)

    def forward(self, batch: StepBatch, caches: list[LayerCache], block_size: int) -> Tensor:
        """Compute the step's tokens, writing their KV; returns float32 logits [S, vocabulary] of the sampled rows."""
        states = self.states(batch, caches, block_size)
        return self.logits(states, batch.query_starts[[sample.row + 1 for sample in batch.samples]] - 1)

    def states(
        self, batch: StepBatch, caches: list[LayerCache], block_size: int, before: Tensor | None = None
    ) -> States:
        """Compute the step's tokens, writing their KV; returns what they are before the last norm."""
        (token_ids,) = upload([batch.token_ids], self._device)
        feed(token_ids, batch, before)
        return self.through(token_ids, self._kernels.step(batch, block_size), caches)

    def through(self, token_ids: Tensor, attention: StepAttention, caches: list[LayerCache]) -> States:
        """The same for what is on the device already; waits for nothing there, so that CUDA can capture it."""
        residual = F.embedding(token_ids, self._embedding)
        return States(self._decoder(residual, attention, caches), residual)

    def logits(self, states: States, tokens: NDArray[np.integer[Any]]) -> Tensor:
        """float32 logits [P, vocabulary] of P of the step's tokens, by their index 0..T-1."""
        if not len(tokens):
            return torch.empty(0, self._config.vocab_size, device=self._device)
        (rows,) = upload([tokens], self._device)
        eps = self._config.norm_eps
        assert states.added is not None
        normed = self._kernels.add_rms_norm(states.added[rows], states.residual[rows], self._norm, eps)
        return self._head(normed).float()

    def _layer(self, weights: Weights, prefix: str, window: int) -> DecoderLayer:
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

        return DecoderLayer(
            input_norm_C=weights.take(prefix + "input_layernorm.weight", hidden),
            qkv=linear(
                {"self_attn.q_proj": queries, "self_attn.k_proj": kv, "self_attn.v_proj": kv}, hidden, config.qkv_bias
            ),
            qk_norm=qk_norm,
            out=linear({"self_attn.o_proj": hidden}, queries, config.out_bias),
            mlp_norm_C=weights.take(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=linear({"mlp.gate_proj": inner, "mlp.up_proj": inner}, hidden, config.mlp_bias),
            down=linear({"mlp.down_proj": hidden}, inner, config.mlp_bias),
            window=window,
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

"""Tiny random models of the llama family, made by transformers and saved as a model folder."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 131
CONTEXT_LEN = 128

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": CONTEXT_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


def _rope(rope_type: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, "rope_type": rope_type, **settings}}


CONFIGS: dict[str, Any] = {
    "llama, grouped heads": LlamaConfig(**_BASE),
    "llama, tied": LlamaConfig(**_BASE | {"tie_word_embeddings": True}),
    "llama, one KV head": LlamaConfig(**_BASE | {"num_key_value_heads": 1}),
    "llama, all KV heads": LlamaConfig(**_BASE | {"num_key_value_heads": 6}),
    "llama, wide heads": LlamaConfig(**_BASE | {"head_dim": 20}),
    "llama, biases everywhere": LlamaConfig(**_BASE | {"attention_bias": True, "mlp_bias": True}),
    "llama, linear rope": LlamaConfig(**_BASE | _rope("linear", factor=4.0)),
    "llama, dynamic rope": LlamaConfig(**_BASE | _rope("dynamic", factor=4.0)),
    "llama, yarn rope": LlamaConfig(**_BASE | _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama, llama3 rope": LlamaConfig(
        **_BASE
        | _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    ),
    "llama, longrope": LlamaConfig(
        **_BASE | _rope("longrope", short_factor=[1.5] * 4, long_factor=[3.0] * 4, original_max_position_embeddings=96)
    ),
    "mistral, sliding window": MistralConfig(**_BASE | {"sliding_window": 7}),
    "mistral, whole context": MistralConfig(**_BASE | {"sliding_window": None}),
    "mistral, wide heads, tied, one KV head": MistralConfig(
        **_BASE | {"head_dim": 20, "tie_word_embeddings": True, "num_key_value_heads": 1}
    ),
    "qwen2": Qwen2Config(**_BASE),
    "qwen2, tied, all KV heads": Qwen2Config(**_BASE | {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "qwen2, window in some layers": Qwen2Config(
        **_BASE | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen3": Qwen3Config(**_BASE | {"head_dim": 16}),
    "qwen3, tied, biases, window in some layers": Qwen3Config(
        **_BASE
        | {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}
        | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
}


def reference(name: str) -> PreTrainedModel:
    """transformers' own model of the shape of that name."""
    return made(CONFIGS[name])


def made(config: PreTrainedConfig) -> PreTrainedModel:
    """transformers' own model of that shape: random, the same each time, biases and norms random too."""
    generator = torch.Generator().manual_seed(11)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def save(model: PreTrainedModel, folder: Path, **sizes: Any) -> Path:
    """Write a model folder; ``sizes`` go to save_pretrained (max_shard_size)."""
    model.save_pretrained(folder, **sizes)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of words w0, w1, ... with two special tokens, and a template that ends turns with one of them."""
    vocab = {f"w{i}": i for i in range(VOCAB_SIZE)} | {"<|im_end|>": 2, "<|endoftext|>": 3}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<|im_end|>", "<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    config = {"chat_template": template, "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of model.safetensors; None removes one."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)

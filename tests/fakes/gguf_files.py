"""GGUF files written from transformers' models, as converters write them."""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

NORMAL, CONTROL = 1, 3
"""Values of ``tokenizer.ggml.token_type``."""

Metadata = Callable[[gguf.GGUFWriter], None]


def write(
    file: Path,
    model: PreTrainedModel,
    architecture: str,
    vocabulary: Metadata,
    *,
    without: Collection[str] = (),
    extra: Mapping[str, torch.Tensor] = {},
    more: Metadata = lambda writer: None,
) -> Path:
    """``without`` are names of transformers' tensors, ``extra`` of the file's; ``more`` adds metadata."""
    config: Any = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if architecture == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    vocabulary(writer)
    more(writer)
    for name, tensor in _tensors(model, architecture, without).items():
        writer.add_tensor(name, tensor.detach().numpy())
    for name, tensor in extra.items():
        writer.add_tensor(name, tensor.numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return file


def _tensors(model: PreTrainedModel, architecture: str, without: Collection[str]) -> dict[str, torch.Tensor]:
    config: Any = model.config
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name in without or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and architecture == "llama":  # query and key rows interleaved, biases too
            rows, *columns = tensor.shape
            tensor = tensor.view(heads, 2, rows // heads // 2, *columns).transpose(1, 2).reshape(rows, *columns)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        tensors[str(names.get_name(name, (".weight", ".bias")))] = tensor.contiguous()
    return tensors


def byte_level(tokenizer: Tokenizer, pre: str, size: int) -> Metadata:
    """A vocabulary of byte-level merges, filled up to ``size``."""
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        _add_tokens(writer, tokenizer, size)
        writer.add_token_merges(merges)
        writer.add_add_bos_token(False)

    return add


def sentencepiece(tokenizer: Tokenizer, size: int, **flags: bool) -> Metadata:
    """A vocabulary of sentencepiece's merges: the score of a token is minus its place."""

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        _add_tokens(writer, tokenizer, size)
        writer.add_token_scores([-float(i) for i in range(size)])
        for name, flag in flags.items():
            getattr(writer, f"add_{name}")(flag)

    return add


def _add_tokens(writer: gguf.GGUFWriter, tokenizer: Tokenizer, size: int) -> None:
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    known = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(i) if i < known else f"[PAD{i}]" for i in range(size)]
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if i in special else NORMAL for i in range(size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

"""Turns a GGUF file into a model folder: config, tokenizer and bfloat16 safetensors.

Called by ``tools.model`` only. Needs torch, transformers, accelerate and gguf (the executor extra); imported when used,
so that the command line starts without them.
"""

import io
import json
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
from safetensors.torch import save_file
from tokenizers import normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from tools import gguf_config

_PRE_KEY = "tokenizer.ggml.pre"
_GPT2_SPLITS = {"gpt-2", "phi-2", "mpt", "olmo", "jais"}
"""Names in ``tokenizer.ggml.pre`` that mean GPT-2's own split, which transformers falls back to for any name."""
_NFC = {"qwen2"}
"""Names whose original tokenizers compose characters first, of which a file says nothing."""
_DIGIT_SPLITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
"""Names that mean: every digit alone, then GPT-2's split (llama.cpp, src/llama-vocab.cpp)."""


def convert(gguf_file: Path, directory: Path, on_progress: Callable[[str], None]) -> None:
    """Write the model folder of ``gguf_file`` into ``directory`` (which exists).

    Raises ValueError when the file cannot be read or is of a kind that cannot be converted.
    """
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):  # transformers' bars go to stderr, always
            warnings.simplefilter("ignore")
            on_progress(f"reading the tokenizer of {gguf_file.name}")
            reader = GGUFReader(gguf_file)
            tokenizer = _tokenizer(gguf_file, reader)
            config = AutoConfig.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True)
            gguf_config.complete(config, reader)
            on_progress(f"converting {gguf_file.name} to bfloat16 safetensors")
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                gguf_file.parent,
                gguf_file=gguf_file.name,
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
            )
            model, report = loaded
            _check_complete(report)
            unused = _unused(model, reader)
    except (OSError, KeyError, IndexError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ValueError(f"cannot convert {gguf_file}: {error}") from error
    if unused:
        on_progress(f"{gguf_file.name} holds tensors that this model does not use: {', '.join(unused[:8])}")
    _save_tokenizer(tokenizer, int(model.config.max_position_embeddings), directory)
    _save_model(model, directory)


def _check_complete(report: dict[str, Any]) -> None:
    """Raise ValueError naming what the file lacked: transformers fills it with random numbers and goes on."""
    lacking = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"], *report["error_msgs"]]))
    if lacking:
        raise ValueError(f"the file lacks or misshapes {', '.join(lacking[:8])}")


def _unused(model: Any, reader: GGUFReader) -> list[str]:
    """Tensors of the file that no part of the model came from."""
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == gguf_config.architecture(reader))
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)
    used = {names.get_name(name, (".weight", ".bias")) for name in model.state_dict()}
    return sorted({tensor.name for tensor in reader.tensors} - used - {gguf_config.ROPE_FACTORS})


def _tokenizer(gguf_file: Path, reader: GGUFReader) -> Any:
    """The file's tokenizer, with the split of text that its merges were learned on.

    transformers ignores a ``tokenizer.ggml.pre`` it does not know, which silently changes token ids (runs of spaces
    before digits, for SmolLM); an unknown name therefore stops the conversion.
    """
    fields = reader.fields
    kind, name = (fields[key].contents() if key in fields else "" for key in ("tokenizer.ggml.model", _PRE_KEY))
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, local_files_only=True)
    if kind != "gpt2":
        return tokenizer
    backend = tokenizer.backend_tokenizer
    if name in _NFC:
        backend.normalizer = normalizers.NFC()
    if name in _DIGIT_SPLITS:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif name not in _GPT2_SPLITS and '"Split"' not in backend.to_str():
        raise ValueError(f"unknown pre-tokenizer {name!r} ({_PRE_KEY})")
    return tokenizer


def _save_tokenizer(tokenizer: Any, context_len: int, directory: Path) -> None:
    tokenizer.model_max_length = context_len
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    config_file = directory / "tokenizer_config.json"
    config = json.loads(config_file.read_text())
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _save_model(model: Any, directory: Path) -> None:
    """Config, generation config and weights. transformers refuses to save a model it has read from GGUF."""
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config.pop("_model_name_or_path", None)
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = model.generation_config or GenerationConfig.from_model_config(model.config)
    generation.save_pretrained(directory)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:  # tied tensors are stored once, under the first of their names
            tensors[name] = tensor.to(torch.bfloat16).contiguous()
            seen.add(tensor.data_ptr())
    weights_file = directory / "model.safetensors"
    save_file(tensors, weights_file, metadata={"format": "pt"})
    weights_file.chmod((directory / "config.json").stat().st_mode)  # safetensors writes for the owner alone

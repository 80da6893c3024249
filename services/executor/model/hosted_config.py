"""What a model folder says of a model that transformers computes and we serve, refused where its state is not ours.

Called by ``choice`` for every architecture we have not written out ourselves. Nothing is loaded here.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from services.executor.model import rope

_LAYER_TYPES = ("full_attention", "sliding_attention")
_CONTEXT_NAMES = ("max_position_embeddings", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class HostedConfig:
    """Facts of a model that transformers computes."""

    architecture: str
    vocab_size: int
    context_len: int
    """Positions the model was trained for (see ``rope.context_len``)."""
    num_layers: int
    windows_expected: bool
    """Whether some layer must be seen to attend within a window."""


def read(folder: Path, raw: dict[str, Any]) -> HostedConfig:
    """Read ``folder``, whose config.json is ``raw``. Raises ValueError, naming what it is, for what cannot be."""
    architecture = (raw.get("architectures") or ["(none)"])[0]
    rope.check(raw, rope.TYPES)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever a bad value leads to
        raise ValueError(f"unsupported architecture {architecture}: {error}") from error
    _check_class(architecture, config)
    text = config.get_text_config()
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise ValueError(f"unsupported architecture {architecture}: it has layers of kind {kind!r}")
    return HostedConfig(
        architecture=architecture,
        vocab_size=text.vocab_size,
        context_len=_context_len(architecture, text),
        num_layers=text.num_hidden_layers,
        windows_expected=_expects_windows(text),
    )


def _check_class(architecture: str, config: Any) -> None:
    """Refuse what is no causal language model, and what keeps more of a token than keys and values."""
    known: Any = AutoModelForCausalLM._model_mapping.get(type(config), None)
    why = None
    if known is None:
        why = "transformers knows no causal language model of that kind"
    elif config.is_encoder_decoder:
        why = "it is an encoder and a decoder"
    elif known.__name__ != architecture:
        why = f"the causal language model of its kind is {known.__name__}"
    elif getattr(known, "_is_stateful", False):
        why = "what it keeps of a sequence is more than keys and values of attention"
    if why is not None:
        raise ValueError(f"unsupported architecture {architecture}: {why}")


def _context_len(architecture: str, text: Any) -> int:
    trained = next((getattr(text, name) for name in _CONTEXT_NAMES if isinstance(getattr(text, name, None), int)), 0)
    if trained < 1:
        raise ValueError(f"unsupported architecture {architecture}: its config names no {_CONTEXT_NAMES[0]}")
    return rope.context_len(text, trained)


def _expects_windows(text: Any) -> bool:
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return "sliding_attention" in kinds
    return bool(getattr(text, "sliding_window", None)) and getattr(text, "use_sliding_window", True) is not False

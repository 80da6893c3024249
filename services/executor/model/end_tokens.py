"""Every token id that ends a turn, whichever file says so, and the tokenizer's digest.

Called by the torch backend. Reads JSON only: generation that knows one end id of two runs on past the end of the turn.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|end_of_text|>", "</s>")
"""Names that end a turn in the chat templates that use them."""


def end_token_ids(folder: Path) -> list[int]:
    """Sorted union of the end ids of config, generation config, tokenizer config and chat template."""
    tokenizer_config = _json(folder / "tokenizer_config.json")
    ids = set()
    for name in ("config.json", "generation_config.json"):
        ids |= _ids(_json(folder / name).get("eos_token_id"))
    special = {token["content"]: token["id"] for token in _json(folder / "tokenizer.json").get("added_tokens") or ()}
    eos = tokenizer_config.get("eos_token")
    named = {eos.get("content") if isinstance(eos, dict) else eos}
    template = _template(folder, tokenizer_config)
    named |= {name for name in _END_OF_TURN if name in template}
    return sorted(ids | {special[name] for name in named if name in special})


def tokenizer_digest(folder: Path) -> str:
    """sha256 hex of tokenizer.json. Raises ValueError without one."""
    try:
        return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    except OSError as error:
        raise ValueError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error


def _ids(value: Any) -> set[int]:
    """A config's end ids: a number, a list, or null."""
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and item >= 0}


def _template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    """The chat template's text; several named ones are taken together."""
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else tokenizer_config.get("chat_template")
    return template if isinstance(template, str) else json.dumps(template or "", ensure_ascii=False)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    return content if isinstance(content, dict) else {}

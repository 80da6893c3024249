"""The formats of tool calls, and which of them a model uses: as the operator says, or found in its chat template."""

import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass

from services.gateway.options import FormatName
from services.gateway.text.tool_calls import hermes, llama3, mistral
from services.gateway.text.tool_calls.notation import Notation
from services.gateway.text.tool_calls.parser import ToolParser


@dataclass(frozen=True)
class ToolFormat:
    """One format."""

    parser: type[ToolParser]
    notation: Notation
    short_ids: bool = False
    """Whether the model's template takes ids of nine letters and digits only."""

    def new_parser(self, names: Collection[str], *, parallel: bool) -> ToolParser:
        """For one text; see ``ToolParser``."""
        return self.parser(names, self.new_call_id, parallel=parallel)

    def new_call_id(self) -> str:
        """For one call; clients send it back with its result."""
        if self.short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


HERMES = ToolFormat(hermes.HermesParser, hermes.NOTATION)
LLAMA3 = ToolFormat(llama3.Llama3Parser, llama3.NOTATION)
MISTRAL = ToolFormat(mistral.MistralParser, mistral.NOTATION, short_ids=True)
MISTRAL_LIST = ToolFormat(mistral.MistralParser, mistral.LIST_NOTATION, short_ids=True)


def takes_tools(template: str) -> bool:
    """Whether a chat template writes the tools it is given. Those of others are written by ``tool_prompt``."""
    return "tools" in template


def format_of(name: FormatName, template: str) -> ToolFormat | None:
    """The format by its name, or for ``auto`` by the chat template; None if calls cannot be read or asked for."""
    if name == "none" or not template:
        return None
    if name == "auto":
        name = _name_in(template)
    if not takes_tools(template) and name != "hermes":
        return None  # the model is told of tools by ``tool_prompt``, and answers as that says
    match name:
        case "hermes":
            return HERMES
        case "llama3":
            return LLAMA3
        case "mistral":
            return MISTRAL if mistral.ARGS in template else MISTRAL_LIST
    return None


def _name_in(template: str) -> FormatName:
    if mistral.BEGIN in template:
        return "mistral"
    if hermes.BEGIN in template or not takes_tools(template):
        return "hermes"
    if llama3.PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return "none"

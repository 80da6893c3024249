"""How a model marks the parts of what it writes: as the operator says, or found in its chat template. Pure."""

from dataclasses import dataclass

from services.gateway.options import GatewayOptions
from services.gateway.text.reasoning import marks_reasoning
from services.gateway.text.tool_calls.formats import ToolFormat, format_of


@dataclass(frozen=True)
class Dialect:
    """Of one chat template."""

    tools: ToolFormat | None
    """How calls are written; None if none can be taken from it."""
    reasoning: bool
    """Whether thoughts are split off the text."""


def dialect_of(options: GatewayOptions, template: str) -> Dialect:
    """``template`` is its source; empty if there is none."""
    parser = options.reasoning_parser
    reasoning = parser == "think" or (parser == "auto" and marks_reasoning(template))
    return Dialect(format_of(options.tool_call_parser, template), reasoning)

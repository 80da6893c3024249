"""Request fields that would change the output and cannot be honoured: refused by name, never silently ignored.

Called by ``services.gateway.api.schema``; pure. A value that asks for nothing (null, the field's neutral value) passes.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from services.gateway.api.errors import invalid


def _is(*neutral: Any) -> Callable[[Any], bool]:
    """Equal to one of ``neutral``, where true and 1 are not the same."""
    return lambda value: any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


_nothing = _is("", [], {}, False)
_zero = _is(0, 0.0)

Neutral = Mapping[str, Callable[[Any], bool]]
"""Field -> does this value ask for nothing?"""

NEUTRAL: Neutral = {
    "allowed_token_ids": _nothing,
    "audio": _nothing,
    "bad_words": _nothing,
    "best_of": _is(1),
    "documents": _nothing,
    "echo": _is(False),
    "function_call": _is("none", "auto"),
    "functions": _nothing,
    "length_penalty": _is(1, 1.0),
    "logits_processors": _nothing,
    "mm_processor_kwargs": _nothing,
    "modalities": _is(["text"]),
    "moderation": _nothing,
    "prompt_logprobs": _is(False),
    "return_tokens_as_token_ids": _is(False),
    "suffix": _nothing,
    "thinking_token_budget": _nothing,
    "top_logprobs": _zero,
    "truncate_prompt_tokens": _nothing,
    "use_beam_search": _is(False),
    "web_search_options": _nothing,
}
"""Of chat and completions. ``echo`` is refused in chat, ``top_logprobs`` in completions: the other has them."""

IGNORED = frozenset(NEUTRAL) | {
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}
"""Fields that are known and need no line in the log: harmless without effect, or dealt with here."""


class Others(NamedTuple):
    """Fields of one endpoint that its schema does not have."""

    refused: Neutral
    ignored: frozenset[str]


CHAT_AND_COMPLETIONS = Others(NEUTRAL, IGNORED)

RESPONSES = Others(
    refused={
        "background": _is(False),
        "conversation": _nothing,
        "moderation": _nothing,
        "previous_response_id": _nothing,
        "prompt": _nothing,
    },
    ignored=frozenset(
        {
            "access_programs",
            "background_options",
            "context_management",
            "image",
            "max_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "stream_options",
            "truncation",
            "user",
        }
    ),
)
"""Of ``/v1/responses``. Nothing is stored, so nothing can be gone on with."""

MESSAGES = Others(
    refused={"container": _nothing, "mcp_servers": _nothing},
    ignored=frozenset(
        {
            "cache_control",
            "diagnostics",
            "inference_geo",
            "metadata",
            "service_tier",
            "speed",
            "user_profile_id",
            "workspace_id",
        }
    ),
)
"""Of ``/v1/messages`` and its ``count_tokens``."""

TOKENIZE = Others(refused={"mm_processor_kwargs": _nothing}, ignored=frozenset())
"""Of ``/tokenize`` and ``/detokenize``."""


def refuse_unsupported(fields: dict[str, Any], refused: Neutral) -> None:
    """Raise ApiError (400) for the first field, by name, whose value asks for what is not there."""
    for name in sorted(fields.keys() & refused.keys()):
        value = fields[name]
        if value is None or refused[name](value):
            continue
        raise invalid(f"{name} is not supported", name, "unsupported_parameter")

"""A conversation to the prompt's token ids, through the model's own template. Called in a thread by the chat endpoint.

A template is code of the model: whatever it raises says that it does not take these messages, which is the client's
to mend. A rendered template spells all special tokens itself, so none are added when it is tokenized.
"""

from typing import Any

from services.gateway.text.tokenizer import Tokenizer


class TemplateError(ValueError):
    """The template does not take the messages; says why. May quote them."""


def chat_prompt(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final: bool,
    add_special_tokens: bool,
    max_tokens: int,
) -> list[int]:
    """Token ids of the whole conversation, at least one. Raises TemplateError, or TooLong above ``max_tokens``."""
    if not tokenizer.has_chat_template:
        raise TemplateError("the model has no chat template; use /v1/completions")
    try:
        text = tokenizer.render_chat(
            messages, add_generation_prompt=add_generation_prompt, continue_final=continue_final
        )
    except Exception as error:
        detail = str(error).split("\n")[0][:500] or type(error).__name__
        raise TemplateError(f"the chat template does not take these messages: {detail}") from None
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
    if not ids:
        raise TemplateError("the chat template made an empty prompt of these messages")
    return ids

"""A conversation to the prompt's token ids, through a chat template. Called in a thread by the chat endpoint.

Whatever a template raises says that it does not take these messages, which is the client's to mend. A rendered template
spells all special tokens itself, so none are added when it is tokenized.
"""

from typing import NamedTuple

from services.gateway.text.chat_template import ChatTemplate, Conversation
from services.gateway.text.reasoning import is_open
from services.gateway.text.tokenizer import Tokenizer


class TemplateError(ValueError):
    """The template does not take the messages; says why. May quote them."""


class ChatPrompt(NamedTuple):
    """A conversation as the model reads it."""

    ids: list[int]
    """At least one."""
    inside: bool
    """Whether it ends inside the model's thoughts."""


def rendered(template: ChatTemplate | None, conversation: Conversation) -> str:
    """The prompt's text. Raises TemplateError."""
    if template is None:
        raise TemplateError("the model has no chat template; use /v1/completions")
    try:
        return template.render(conversation)
    except Exception as error:
        raise refusal(str(error) or type(error).__name__) from None


def refusal(why: str) -> TemplateError:
    """The template's own words, within bounds."""
    detail = why.split("\n")[0][:500]
    return TemplateError(f"the chat template does not take these messages: {detail}")


def encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, max_tokens: int) -> ChatPrompt:
    """The ids of a prompt. Raises TemplateError, or TooLong above ``max_tokens``."""
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)
    if not ids:
        raise TemplateError("the chat template made an empty prompt of these messages")
    return ChatPrompt(ids, is_open(text))

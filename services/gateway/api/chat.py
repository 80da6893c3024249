"""``POST /v1/chat/completions``."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from services.gateway.api.answer import Answer
from services.gateway.api.endpoint import gateway_of, tenant_of
from services.gateway.api.errors import invalid
from services.gateway.api.prompts import messages_of
from services.gateway.api.schema import ChatRequest, parse
from services.gateway.api.settings import prompt_too_long, settings_of
from services.gateway.choice import Update
from services.gateway.logprobs import Spell, TokenLogprobs, chat_shape
from services.gateway.sse import ChatEvents
from services.gateway.text.chat_template import TemplateError, chat_prompt
from services.gateway.text.tokenizer import TooLong


class ChatAnswer(Answer):
    """Text as an assistant's message."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    events_class = ChatEvents

    def choice(self, update: Update) -> dict[str, Any]:
        """See ``Answer``."""
        return {"message": {"role": "assistant", "content": update.text, "refusal": None}}

    def logprobs(self, told: Sequence[TokenLogprobs], spell: Spell) -> dict[str, Any]:
        """See ``Answer``."""
        return chat_shape(told, spell)

    def add_prompt_ids(self, body: dict[str, Any], prompts: Sequence[list[int]], n: int) -> None:
        """See ``Answer``."""
        body["prompt_token_ids"] = prompts[0]


async def chat(request: Request) -> Answer:
    """Answer the conversation."""
    gateway = gateway_of(request)
    fields = parse(await request.body(), ChatRequest)
    gateway.check_model(fields.model)
    messages = messages_of(fields.messages)
    continue_final = bool(fields.continue_final_message)
    if continue_final and fields.add_generation_prompt:
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    facts = gateway.facts()
    settings = settings_of(fields, facts, gateway.new_seed(), tenant_of(request))

    def encode() -> list[int]:
        return chat_prompt(
            gateway.tokenizer,
            messages,
            add_generation_prompt=not continue_final and fields.add_generation_prompt is not False,
            continue_final=continue_final,
            add_special_tokens=bool(fields.add_special_tokens),
            max_tokens=facts.context_len,
        )

    try:
        prompt = await gateway.in_thread(encode)
    except TemplateError as error:
        raise invalid(str(error), "messages") from None
    except TooLong as error:
        raise prompt_too_long(error.num_tokens, facts) from None
    return ChatAnswer(gateway, settings, [prompt], facts)

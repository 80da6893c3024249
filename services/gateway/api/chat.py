"""``POST /v1/chat/completions``, and what every other endpoint that answers a conversation does with it."""

from starlette.requests import Request

from services.gateway.api.answer import Answer, ShapeOf
from services.gateway.api.endpoint import gateway_of, tenant_of
from services.gateway.api.errors import invalid
from services.gateway.api.prompts import messages_of
from services.gateway.api.schema import ChatRequest, parse
from services.gateway.api.settings import prompt_too_long, settings_of
from services.gateway.gateway import Gateway
from services.gateway.shapes.chunks import ChatChunks
from services.gateway.text.chat_template import TemplateError, chat_prompt
from services.gateway.text.tokenizer import TooLong
from shared.wire.facts import ModelFacts


async def chat(request: Request) -> Answer:
    """Answer the conversation."""
    return await answer_chat(request, parse(await request.body(), ChatRequest), ChatChunks, "chatcmpl-")


async def answer_chat(request: Request, fields: ChatRequest, shape_of: ShapeOf, id_prefix: str) -> Answer:
    """The core path of every conversation, whatever the shape of its answer. Raises ApiError."""
    gateway = gateway_of(request)
    gateway.check_model(fields.model)
    facts = gateway.facts()
    settings = settings_of(fields, facts, gateway.new_seed(), tenant_of(request))
    prompt = await encode_chat(gateway, fields, facts)
    return Answer(gateway, settings, [prompt], facts, shape_of, id_prefix)


async def encode_chat(gateway: Gateway, fields: ChatRequest, facts: ModelFacts) -> list[int]:
    """Token ids of the conversation. Raises ApiError (400)."""
    messages = messages_of(fields.messages)
    continue_final = bool(fields.continue_final_message)
    if continue_final and fields.add_generation_prompt:
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")

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
        return await gateway.in_thread(encode)
    except TemplateError as error:
        raise invalid(str(error), "messages") from None
    except TooLong as error:
        raise prompt_too_long(error.num_tokens, facts) from None

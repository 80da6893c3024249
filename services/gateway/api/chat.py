"""``POST /v1/chat/completions``, and what every other endpoint that answers a conversation does with it."""

from functools import partial
from typing import Any

from starlette.requests import Request

from services.gateway.api.answer import Answer, ShapeOf
from services.gateway.api.chat_format import constraint_of_chat, message_format_of
from services.gateway.api.endpoint import gateway_of, tenant_of
from services.gateway.api.errors import invalid
from services.gateway.api.json_bounds import check_bounds
from services.gateway.api.note import note_of
from services.gateway.api.prompts import messages_of
from services.gateway.api.schema import ChatRequest, parse
from services.gateway.api.settings import prompt_too_long, settings_of
from services.gateway.api.tools import ToolUse, tool_use_of
from services.gateway.gateway import Gateway
from services.gateway.shapes.chunks import ChatChunks
from services.gateway.text.chat_prompt import ChatPrompt, TemplateError, encoded, rendered
from services.gateway.text.chat_template import RESERVED, Conversation
from services.gateway.text.dialect import dialect_of
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
    tool_use = tool_use_of(fields)
    prompt = await encode_chat(gateway, fields, facts, tool_use, len(await request.body()))
    own = fields.chat_template
    dialect = gateway.dialect if own is None else dialect_of(gateway.options, own)
    message_format = message_format_of(dialect, tool_use, inside=prompt.inside)
    asked = settings.constraint
    if asked is not None:
        asked = await gateway.constraints.in_lark(asked, facts)
    constraint = constraint_of_chat(gateway.tokenizer, asked, tool_use, message_format)
    if constraint is not None:
        await gateway.constraints.check(constraint, facts)
        settings = settings.constrained(constraint, facts)
    answer_id = id_prefix + note_of(request.scope).id
    return Answer(gateway, settings, [prompt.ids], facts, shape_of, answer_id, message_format=message_format)


async def encode_chat(
    gateway: Gateway, fields: ChatRequest, facts: ModelFacts, tool_use: ToolUse | None, num_bytes: int
) -> ChatPrompt:
    """Token ids of the conversation in a request of so many bytes. Raises ApiError (400)."""
    own, tokenizer, most = fields.chat_template, gateway.tokenizer, facts.context_len
    add_special_tokens = bool(fields.add_special_tokens)

    def encode(text: str) -> ChatPrompt:
        return encoded(tokenizer, text, add_special_tokens=add_special_tokens, max_tokens=most)

    def all_at_once() -> ChatPrompt:
        template = tokenizer.chat_template(tool_use is not None)
        return encode(rendered(template, _conversation(fields, tool_use)))

    try:
        if own is None:
            return await gateway.on_text(all_at_once, num_bytes)
        gateway.request_templates.check(own)
        conversation = await gateway.on_text(partial(_conversation, fields, tool_use), num_bytes)
        text = await gateway.request_templates.render(own, tokenizer.special_tokens, conversation)
        return await gateway.on_text(partial(encode, text), len(text))
    except TemplateError as error:
        raise invalid(str(error), "messages" if own is None else "chat_template") from None
    except TooLong as error:
        raise prompt_too_long(error.num_tokens, facts) from None


def _conversation(fields: ChatRequest, tool_use: ToolUse | None) -> Conversation:
    """Raises ApiError (400)."""
    continue_final = bool(fields.continue_final_message)
    if continue_final and fields.add_generation_prompt:
        raise invalid("continue_final_message and add_generation_prompt exclude each other", "continue_final_message")
    return Conversation(
        messages=messages_of(fields.messages),
        functions=tool_use.functions if tool_use is not None else [],
        add_generation_prompt=not continue_final and fields.add_generation_prompt is not False,
        continue_final=continue_final,
        variables=_variables(fields),
    )


def _variables(fields: ChatRequest) -> dict[str, Any]:
    """What the template is to see besides: one that knows no efforts does not look at it. Raises ApiError (400)."""
    variables = fields.chat_template_kwargs or {}
    check_bounds(variables, "chat_template_kwargs")
    for name in variables:
        if name in RESERVED or not name.isidentifier():
            raise invalid(f"chat_template_kwargs must not set {name[:64]!r}", "chat_template_kwargs")
    effort = {} if fields.reasoning_effort is None else {"reasoning_effort": fields.reasoning_effort}
    return {**effort, **variables}

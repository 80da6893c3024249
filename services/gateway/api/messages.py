"""``POST /v1/messages`` and ``/v1/messages/count_tokens``: Anthropic's Messages API over the core path of chat."""

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.api.answer import Answer
from services.gateway.api.chat import answer_chat, encode_chat
from services.gateway.api.endpoint import gateway_of
from services.gateway.api.errors import fields_called
from services.gateway.api.messages_request import CHAT_NAMES, CountTokensRequest, MessagesRequest, chat_fields
from services.gateway.api.ops import json_response
from services.gateway.api.refusals import MESSAGES
from services.gateway.api.schema import ChatRequest, checked, parse
from services.gateway.api.tools import tool_use_of
from services.gateway.shapes.messages import Messages


async def messages(request: Request) -> Answer:
    """Answer the conversation."""
    body = await request.body()
    fields = parse(body, MessagesRequest, MESSAGES)
    with fields_called(CHAT_NAMES):
        chat = await gateway_of(request).on_text(lambda: checked(chat_fields(fields), ChatRequest), len(body))
        return await answer_chat(request, chat, Messages, "msg_")


async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt has that the conversation becomes."""
    gateway = gateway_of(request)
    body = await request.body()
    fields = parse(body, CountTokensRequest, MESSAGES)
    gateway.check_model(fields.model)
    with fields_called(CHAT_NAMES):
        chat = await gateway.on_text(lambda: checked(chat_fields(fields), ChatRequest), len(body))
        prompt = await encode_chat(gateway, chat, gateway.facts(), tool_use_of(chat), len(body))
    return json_response({"input_tokens": len(prompt.ids)})

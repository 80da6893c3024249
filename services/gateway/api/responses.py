"""``POST /v1/responses``: OpenAI's Responses API over the core path of chat. Nothing is stored."""

from functools import partial

from starlette.requests import Request

from services.gateway.api.answer import Answer
from services.gateway.api.chat import answer_chat
from services.gateway.api.endpoint import gateway_of
from services.gateway.api.errors import fields_called
from services.gateway.api.refusals import RESPONSES
from services.gateway.api.responses_request import CHAT_NAMES, ResponsesRequest, chat_fields
from services.gateway.api.schema import ChatRequest, checked, parse
from services.gateway.shapes.responses import Responses


async def responses(request: Request) -> Answer:
    """Answer the input."""
    body = await request.body()
    fields = parse(body, ResponsesRequest, RESPONSES)
    with fields_called(CHAT_NAMES):
        chat = await gateway_of(request).on_text(lambda: checked(chat_fields(fields), ChatRequest), len(body))
        return await answer_chat(request, chat, partial(Responses, request=fields), "resp_")

"""``POST /v1/responses``: OpenAI's Responses API over the core path of chat. Nothing is stored."""

from functools import partial

from starlette.requests import Request

from services.gateway.api.answer import Answer
from services.gateway.api.chat import answer_chat
from services.gateway.api.errors import fields_called
from services.gateway.api.refusals import RESPONSES
from services.gateway.api.responses_request import CHAT_NAMES, ResponsesRequest, chat_fields
from services.gateway.api.schema import ChatRequest, checked, parse
from services.gateway.shapes.responses import Responses


async def responses(request: Request) -> Answer:
    """Answer the input."""
    fields = parse(await request.body(), ResponsesRequest, RESPONSES)
    with fields_called(CHAT_NAMES):
        chat = checked(chat_fields(fields), ChatRequest)
        return await answer_chat(request, chat, partial(Responses, request=fields), "resp_")

"""``POST /tokenize`` and ``/detokenize``: the model's tokenizer by itself. No executor takes part."""

from typing import Annotated, Any

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.api.chat import encode_chat
from services.gateway.api.endpoint import gateway_of
from services.gateway.api.errors import invalid
from services.gateway.api.ops import json_response
from services.gateway.api.prompts import check_token_ids
from services.gateway.api.refusals import TOKENIZE
from services.gateway.api.schema import ChatRequest, checked, parse
from services.gateway.api.tools import tool_use_of
from services.gateway.gateway import Gateway
from services.gateway.text.tokenizer import TooLong

MAX_TOKENS = 1_000_000
"""Of one request."""


class TokenizeRequest(Struct, kw_only=True):
    """``POST /tokenize``: a ``prompt``, or ``messages`` and what else makes a chat's prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Annotated[list[int], Meta(max_length=MAX_TOKENS)]


CHAT_FIELDS = (
    "messages",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)


async def tokenize(request: Request) -> Response:
    """Ids of a text, or of the prompt that a conversation becomes."""
    gateway = gateway_of(request)
    body = await request.body()
    fields = parse(body, TokenizeRequest, TOKENIZE)
    gateway.check_model(fields.model)
    facts = gateway.facts()
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("either prompt or messages must be given", "prompt")
    ids = await (_encode(gateway, fields) if fields.prompt is not None else _encode_chat(gateway, fields, len(body)))
    token_strs = None
    if fields.return_token_strs:
        token_strs = await gateway.in_thread(lambda: gateway.tokenizer.tokens(ids))
    answer = {"count": len(ids), "max_model_len": facts.context_len, "tokens": ids, "token_strs": token_strs}
    return await gateway.in_thread(lambda: json_response(answer))


async def _encode(gateway: Gateway, fields: TokenizeRequest) -> list[int]:
    text, specials = fields.prompt, fields.add_special_tokens is not False
    assert text is not None
    encode = gateway.tokenizer.encode
    try:
        return await gateway.in_thread(lambda: encode(text, add_special_tokens=specials, max_tokens=MAX_TOKENS))
    except TooLong as error:
        raise invalid(f"prompt has {error.num_tokens} tokens; at most {MAX_TOKENS} are told", "prompt") from None


async def _encode_chat(gateway: Gateway, fields: TokenizeRequest, num_bytes: int) -> list[int]:
    chat = checked({name: getattr(fields, name) for name in CHAT_FIELDS}, ChatRequest)
    return (await encode_chat(gateway, chat, gateway.facts(), tool_use_of(chat), num_bytes)).ids


async def detokenize(request: Request) -> Response:
    """The text of ids, special tokens spelled out."""
    gateway = gateway_of(request)
    fields = parse(await request.body(), DetokenizeRequest, TOKENIZE)
    gateway.check_model(fields.model)
    check_token_ids(fields.tokens, gateway.facts().vocab_size, "tokens")
    decode = gateway.tokenizer.decode
    text = await gateway.in_thread(lambda: decode(fields.tokens, skip_special_tokens=False))
    return json_response({"prompt": text})

"""``GET /v1/models`` and ``/v1/models/{id}``: the one model that is served, in OpenAI's shape or Anthropic's."""

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.api.endpoint import gateway_of
from services.gateway.api.errors import speaks_anthropic
from services.gateway.api.ops import json_response
from services.gateway.gateway import Gateway


async def models(request: Request) -> Response:
    """The list of one."""
    card = _card_for(request)
    if speaks_anthropic(request.scope):
        return json_response({"data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]})
    return json_response({"object": "list", "data": [card]})


async def model(request: Request) -> Response:
    """The model by its name, or by ``default``."""
    gateway_of(request).check_model(request.path_params["model"])
    return json_response(_card_for(request))


def _card_for(request: Request) -> dict[str, Any]:
    gateway = gateway_of(request)
    return _anthropic_card(gateway) if speaks_anthropic(request.scope) else _card(gateway)


def _card(gateway: Gateway) -> dict[str, Any]:
    return {
        "id": gateway.options.served_model_name,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "paternoster",
        "max_model_len": _context_len(gateway),
    }


def _anthropic_card(gateway: Gateway) -> dict[str, Any]:
    name, context_len = gateway.options.served_model_name, _context_len(gateway)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(gateway.started_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": context_len,
        "max_tokens": context_len,
    }


def _context_len(gateway: Gateway) -> int | None:
    """None until an executor has told it."""
    facts = gateway.link.facts
    return None if facts is None else facts.context_len

"""``GET /v1/models`` and ``/v1/models/{id}``: the one model that is served."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.api.endpoint import gateway_of
from services.gateway.api.ops import json_response
from services.gateway.gateway import Gateway


async def models(request: Request) -> Response:
    """The list of one."""
    return json_response({"object": "list", "data": [_card(gateway_of(request))]})


async def model(request: Request) -> Response:
    """The model by its name, or by ``default``."""
    gateway = gateway_of(request)
    gateway.check_model(request.path_params["model"])
    return json_response(_card(gateway))


def _card(gateway: Gateway) -> dict[str, Any]:
    facts = gateway.link.facts
    return {
        "id": gateway.options.served_model_name,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "paternoster",
        "max_model_len": None if facts is None else facts.context_len,
    }

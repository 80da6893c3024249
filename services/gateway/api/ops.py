"""Routes for operators: life, readiness, metrics, and a look inside. All but the last answer from cached state."""

from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.api.endpoint import gateway_of
from services.gateway.api.errors import not_found, unavailable

STATE_TIMEOUT_S = 2.0


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


async def health(request: Request) -> Response:
    """200 while the process lives."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 once requests can be served, else 503 and why."""
    is_ready, reason = gateway_of(request).status()
    if is_ready:
        return json_response({"status": "ready"})
    return json_response({"status": "not ready", "reason": reason}, 503, unavailable("").headers)


async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    return Response(generate_latest(gateway_of(request).metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def debug_state(request: Request) -> Response:
    """What this gateway, all gateways and the scheduler hold, when the operator allows the question."""
    gateway = gateway_of(request)
    if not gateway.options.debug_endpoints:
        raise not_found(request)
    try:
        scheduler = await gateway.link.query_state(STATE_TIMEOUT_S)
    except (TimeoutError, ValueError):
        raise unavailable("the scheduler does not answer") from None
    gateways = scheduler.pop("gateways", [])
    own = {"name": gateway.options.name, "streams": len(gateway.streams)}
    return json_response({"gateway": own, "gateways": gateways, "scheduler": scheduler})

"""``GET /openapi.json`` and ``/docs``: what this server's HTTP interface is, for programs and for people."""

from functools import cache

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from services.gateway.api.endpoint import gateway_of
from services.gateway.openapi.description import describe
from services.gateway.openapi.page import page_of


@cache
def _openapi(*, needs_key: bool) -> bytes:
    return msgspec.json.encode(describe(needs_key=needs_key))


@cache
def _page(*, needs_key: bool) -> str:
    return page_of(describe(needs_key=needs_key))


async def openapi(request: Request) -> Response:
    """The OpenAPI document."""
    needs_key = bool(gateway_of(request).options.api_keys)
    return Response(_openapi(needs_key=needs_key), media_type="application/json")


async def docs(request: Request) -> Response:
    """The same as a page."""
    return HTMLResponse(_page(needs_key=bool(gateway_of(request).options.api_keys)))

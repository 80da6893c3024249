"""What every endpoint needs around it: the gateway at hand, and errors that become answers."""

import functools
import logging
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from services.gateway.api.errors import ApiError, internal
from services.gateway.api.note import note_of
from services.gateway.api.observe import CLIENT_CLOSED_REQUEST
from services.gateway.api.tenant import Tenant, tenant_in
from services.gateway.failures import log_failure
from services.gateway.gateway import Gateway

_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def gateway_of(request: Request) -> Gateway:
    """The gateway that serves this request."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def tenant_of(request: Request) -> Tenant:
    """Whose request it is."""
    return tenant_in(request.scope)


def endpoint(handle: Endpoint) -> Endpoint:
    """Turn what ``handle`` raises into an answer. A fault of ours is logged without its message: it may quote text."""

    @functools.wraps(handle)
    async def answer(request: Request) -> ASGIApp:
        try:
            return await handle(request)
        except ApiError as error:
            return error.response()
        except ClientDisconnect:
            note_of(request.scope).client_gone = True
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except Exception as error:
            log_failure(_log, request.url.path, error)
            return internal().response()

    return answer

"""Middleware that turns requests away: while draining, without a key, with too large a body. Plain ASGI."""

import hmac
from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.api.errors import ApiError, unavailable
from services.gateway.api.tenant import Tenant, be_tenant
from shared.api_keys import ApiKey, digest_of

OPEN_PATHS = ("/health", "/ready")
"""Answered without a key, and while draining."""
MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_DISCARDED_BYTES = 64 * 1024 * 1024
"""Of a body that is too large: read and dropped, as a client that is still sending would not see the answer."""


class Drain:
    """While draining: 503, and the connection closes so that the client's next request goes elsewhere."""

    def __init__(self, app: ASGIApp, draining: Callable[[], bool]) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or not."""
        if scope["type"] != "http" or not self._draining() or scope["path"] in (*OPEN_PATHS, "/metrics"):
            await self._app(scope, receive, send)
            return
        error = unavailable("the server is shutting down")
        error.headers["Connection"] = "close"
        await error.response()(scope, receive, send)


class ApiKeys:
    """Asks for ``Authorization: Bearer KEY`` or ``x-api-key: KEY``; deny by default.

    Knows only hashes and compares in constant time.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[ApiKey]) -> None:
        self._app = app
        self._keys = tuple(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or not."""
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._allow(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "a valid API key is needed", code="invalid_api_key")
        error.headers["WWW-Authenticate"] = "Bearer"
        await error.response()(scope, receive, send)

    def _allow(self, scope: Scope) -> bool:
        """Whether it has a key; if so, it is its tenant's from here on."""
        key = _key_in(scope)
        if key is None:
            return False
        digest = digest_of(key)
        found = [known for known in self._keys if hmac.compare_digest(digest, known.digest)]  # all, whatever matches
        for known in found:
            be_tenant(scope, Tenant(known.tenant, known.limits))
        return bool(found)


def _key_in(scope: Scope) -> bytes | None:
    """The key that a request brings: a bearer's, else one in ``x-api-key`` as Anthropic's clients send it."""
    given: dict[bytes, list[bytes]] = {b"authorization": [], b"x-api-key": []}
    for name, value in scope["headers"]:
        if name in given:
            given[name].append(value)
    bearers = [value[7:].strip() for value in given[b"authorization"] if value[:7].lower() == b"bearer "]
    keys = bearers or given[b"x-api-key"]
    return keys[0] if len(keys) == 1 else None


class BodyLimit:
    """Refuses a body of more than ``MAX_BODY_BYTES``, announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. Reading past the limit raises ApiError (413) in the endpoint."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
                await _discard(receive)
                await self._too_large().response()(scope, receive, send)
                return
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                if message.get("more_body"):
                    await _discard(receive)
                raise self._too_large()
            return message

        await self._app(scope, limited, send)

    def _too_large(self) -> ApiError:
        error = ApiError(413, f"the request body is larger than {self._max_bytes} bytes", code="body_too_large")
        error.headers["Connection"] = "close"
        return error


async def _discard(receive: Receive) -> None:
    num_bytes = 0
    while num_bytes < MAX_DISCARDED_BYTES:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            return

"""Headers that every answer carries, refusals too: what browsers and caches may do with it. Plain ASGI."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
UNLESS_GIVEN = ((b"cache-control", b"no-store"),)
"""Answers are one client's own; a stream has a word of its own for proxies."""
POLICY = b"content-security-policy"
OF_DATA = b"default-src 'none'; frame-ancestors 'none'"
OF_PAGES = b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""For a page that says nothing itself: its own styles, and nothing that runs, loads or frames it."""


class SecurityHeaders:
    """Adds them to what comes from inside."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = with_security(list(message.get("headers", ())))
            await send(message)

        await self._app(scope, receive, send_with_headers)


def with_security(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers of an answer and those that are missing."""
    given = dict(headers)
    headers += ALWAYS
    headers += (header for header in UNLESS_GIVEN if header[0] not in given)
    if POLICY not in given:
        headers.append((POLICY, OF_PAGES if given.get(b"content-type", b"").startswith(b"text/html") else OF_DATA))
    return headers

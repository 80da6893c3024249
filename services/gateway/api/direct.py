"""The way to the connection, past all middlewares: they change heads only, and a stream sends a body for each token.

Outermost of all; plain ASGI.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.api.note import note_of


class Direct:
    """Notes the connection's own ``send`` for whoever streams."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note = note_of(scope)
        note.send_body = send
        try:
            await self._app(scope, receive, send)
        finally:
            note.send_body = None  # it knows the connection, which knows the scope and so the note

"""One HTTP connection, with what uvicorn's own leaves to a proxy in front: bounds, and the client's leaving seen.

uvicorn makes one per connection (``main`` passes the class). Whatever a client sends or does not send, a connection
holds a bounded amount of memory, ends by itself, and tells its running request at once when the client has left.
"""

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.api.errors import ApiError, invalid
from services.gateway.api.headers import with_security
from services.gateway.api.note import note_of

MAX_HEAD_BYTES = 64 * 1024
"""Of a request's line and headers (and of trailers): the parser has no limit, and copies what it holds at each turn."""
MAX_BEHIND_BYTES = 64 * 1024
"""Of what a client sends behind a request that is not answered yet."""
CLIENT_SILENCE_S = 60.0
"""For a whole head, from the connection or its first byte on, and between two pieces of a body."""

_OFFER_HEADERS = (b"upgrade", b"http2-settings")


class Connection(HttpToolsProtocol):
    """uvicorn's connection, bounded."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there; its request must come in time."""
        self._num_bare_bytes = 0
        self._progressed = False
        self._awaits_more: bool | None = None
        """Whether, by what came last, the client has more to send; None: it told nothing new."""
        self._behind = bytearray()
        self._unanswered: list[RequestResponseCycle] = []
        self._silence: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """Every request that runs or waits here learns of it; uvicorn tells the newest only."""
        self._expect_nothing()
        for cycle in self._unanswered:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
                note_of(cycle.scope).gone()  # type: ignore[arg-type]  # a TypedDict
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse, unless a request before it is still being answered."""
        if self._is_answering():
            self._behind += data
            if len(self._behind) > MAX_BEHIND_BYTES:
                self.flow.pause_reading()
            return
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.logger.warning("a request that is no HTTP")
            self._refuse(invalid("this is not a valid HTTP request", code="invalid_http"))
            return
        if self._awaits_more is False:
            self._expect_nothing()
        elif self._awaits_more or (self._silence is None and not self._is_answering()):
            self._expect_more()  # empty lines are no request yet
        self._num_bare_bytes = 0 if self._progressed else self._num_bare_bytes + len(data)
        if self._num_bare_bytes > MAX_HEAD_BYTES:
            self._refuse(
                ApiError(431, f"the request's headers are larger than {MAX_HEAD_BYTES} bytes", code="headers_too_large")
            )

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _parse(self, data: bytes) -> None:
        self._progressed, self._awaits_more = False, None
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                if not self._is_offer():
                    raise httptools.HttpParserError("CONNECT is for proxies") from None
                # The parser takes what follows for the other protocol, a body too. We speak HTTP/1.1 on, so the same
                # request is parsed again without the offer.
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
            else:
                return

    def _head_without_offer(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _OFFER_HEADERS)
            if name not in _OFFER_HEADERS:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def _is_offer(self) -> bool:
        """Whether this request offers another protocol (h2c, TLS, WebSocket), as some clients do with every request."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    # What the parser tells.

    def on_message_begin(self) -> None:
        """The first byte of a head."""
        super().on_message_begin()
        self._awaits_more = True

    def on_headers_complete(self) -> None:
        """The head is there: its request begins, or waits for the one before it."""
        if self._is_offer():
            return
        self._progressed = True
        self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete]
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        if len(self._unanswered) > 1:
            self.flow.resume_reading()  # or the end of the connection would not be seen
        self._awaits_more = True

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._progressed = True
        super().on_body(body)
        self._awaits_more = True

    def on_message_complete(self) -> None:
        """The request is whole; now it is our turn."""
        if self._is_offer():
            return
        self._progressed = True
        super().on_message_complete()
        self._awaits_more = False
        self.flow.resume_reading()  # a long body has paused it, and the client's leaving must be seen

    def on_response_complete(self) -> None:
        """Answered: what came behind is next."""
        super().on_response_complete()
        if self._behind and not self.transport.is_closing() and not self._is_answering():
            behind, self._behind = bytes(self._behind), bytearray()
            self.data_received(behind)

    # The client's turn.

    def _expect_more(self) -> None:
        self._expect_nothing()
        self._silence = self.loop.call_later(CLIENT_SILENCE_S, self.timeout_keep_alive_handler)

    def _expect_nothing(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _refuse(self, error: ApiError) -> None:
        """Answer what never became a request; the connection is of no more use."""
        if not any(not cycle.response_complete for cycle in self._unanswered):  # never into another answer
            body = error.body()
            own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
            lines = [name + b": " + value for name, value in with_security([*own, (b"connection", b"close")])]
            self.transport.write(b"\r\n".join([b"HTTP/1.1 %d Refused" % error.status, *lines, b"", body]))
        self.transport.close()

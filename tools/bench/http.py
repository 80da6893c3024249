"""Just enough of HTTP/1.1 and server-sent events for a client that must not be the bottleneck it measures.

The parsers take bytes as they come, cut anywhere; ``exchange`` drives them over asyncio. Called by
``tools.bench.client``; imports the standard library only.
"""

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_READ_BYTES = 64 * 1024
_LONGEST_HEAD = 64 * 1024


class HttpError(Exception):
    """The peer does not speak HTTP/1.1 as we know it, or the answer was cut short."""


class ResponseParser:
    """One response: ``feed`` returns the body bytes that the new bytes complete. The body ends by Content-Length, the
    last chunk or the connection's end."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is there."""
        self.headers: dict[str, str] = {}
        self.done = False
        self._buffer = b""
        self._chunked = False
        self._left: int | None = None
        """Bytes left of the body, or of the present chunk; None: until the connection ends."""

    def feed(self, data: bytes) -> bytes:
        """Raises HttpError."""
        self._buffer += data
        if not self.status and not self._take_head():
            return b""
        return self._take_chunks() if self._chunked else self._take_plain()

    def end(self) -> None:
        """The connection ended. Raises HttpError when the response had not."""
        if not self.status or (not self.done and (self._chunked or self._left is not None)):
            raise HttpError("the connection ended in the middle of the answer")
        self.done = True

    def _take_head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if len(self._buffer) > _LONGEST_HEAD:
                raise HttpError("an answer without an end of its headers")
            return False
        self._buffer = rest
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise HttpError(f"not an HTTP/1.1 answer: {first[:60]!r}")
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        self.status = int(words[1])
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        if self._chunked:
            self._left = 0
        elif "content-length" in self.headers:
            self._left = int(self.headers["content-length"])
            self.done = self._left == 0
        return True

    def _take_plain(self) -> bytes:
        body = self._buffer if self._left is None else self._buffer[: self._left]
        self._buffer = self._buffer[len(body) :]
        if self._left is not None:
            self._left -= len(body)
            self.done = self._left == 0
        return body

    def _take_chunks(self) -> bytes:
        body = []
        while not self.done:
            assert self._left is not None
            if self._left:  # inside a chunk; its closing line break counts as part of it
                if len(self._buffer) < self._left:
                    break
                body.append(self._buffer[: self._left - 2])
                self._buffer = self._buffer[self._left :]
                self._left = 0
            size, found, rest = self._buffer.partition(b"\r\n")
            if not found:
                break
            try:
                length = int(size.split(b";")[0], 16)
            except ValueError:
                raise HttpError(f"not a chunk's size: {size[:20]!r}") from None
            self._buffer = rest
            self._left = length + 2
            self.done = length == 0
        return b"".join(body)


class EventParser:
    """Server-sent events: ``feed`` returns the data of the events that the new bytes complete. Comments and other
    fields are left out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Data of each completed event, the lines of one event joined by newlines."""
        events = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


@dataclass(frozen=True)
class Server:
    """Where an OpenAI-compatible server is: any URL, with or without a path, with or without TLS."""

    host: str
    port: int
    path: str
    tls: bool
    api_key: str = ""

    @classmethod
    def at(cls, url: str, api_key: str = "") -> "Server":
        """Raises ValueError."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http or https URL")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), path, tls, api_key)

    def request(self, method: str, path: str, body: Any = None) -> bytes:
        """The bytes of one request after which the connection closes."""
        data = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {self.host}:{self.port}", "Connection: close"]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + data


async def exchange(
    server: Server, request: bytes, on_sent: Callable[[], None], on_body: Callable[[int, bytes], None]
) -> int:
    """One request on a connection of its own; returns the status once the body has ended.

    ``on_sent`` is called when the request is on its way (connecting is not part of a server's answer time),
    ``on_body`` with the status and each part of the body. Raises OSError and HttpError.
    """
    tls = ssl.create_default_context() if server.tls else None
    reader, writer = await asyncio.open_connection(server.host, server.port, ssl=tls)
    try:
        on_sent()
        writer.write(request)
        await writer.drain()
        parser = ResponseParser()
        while not parser.done:
            data = await reader.read(_READ_BYTES)
            if not data:
                parser.end()
                break
            if body := parser.feed(data):
                on_body(parser.status, body)
        return parser.status
    finally:
        writer.close()


async def get_json(server: Server, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and decoded body of one request; the body is None when it is no JSON. Raises OSError and HttpError."""
    parts: list[bytes] = []
    status = await exchange(
        server, server.request(method, path, body), lambda: None, lambda _, part: parts.append(part)
    )
    try:
        return status, json.loads(b"".join(parts))
    except ValueError:
        return status, None

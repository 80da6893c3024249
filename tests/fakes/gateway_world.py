"""A real gateway on a real port before a scripted scheduler, all on the test's own event loop."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai

from services.gateway.gateway import Gateway, load_tokenizer
from services.gateway.main import http_server
from services.gateway.options import GatewayOptions
from shared.api_keys import plain_key
from tests.fakes.scripted_scheduler import ScriptedScheduler
from tests.fakes.waiting import await_until


@dataclasses.dataclass
class World:
    """What a test has in hand."""

    scheduler: ScriptedScheduler
    gateway: Gateway
    url: str
    port: int
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    tls: ssl.SSLContext | None = None
    """For connections of a test's own to a gateway with TLS."""

    async def post(self, path: str, **fields: Any) -> httpx.Response:
        """Send a JSON body."""
        return await self.http.post(path, json=fields)

    async def complete(self, **fields: Any) -> httpx.Response:
        """``POST /v1/completions``."""
        return await self.post("/v1/completions", **{"prompt": "hello", **fields})

    async def chat(self, **fields: Any) -> httpx.Response:
        """``POST /v1/chat/completions``."""
        return await self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **fields})

    async def until_idle(self, timeout_s: float = 2.0) -> None:
        """Nothing is live, neither here nor there."""
        await await_until(
            lambda: not len(self.gateway.streams) and not self.scheduler.runs, timeout_s, "gateway and scheduler idle"
        )


@contextlib.asynccontextmanager
async def world(
    scheduler: ScriptedScheduler, *, wait_ready: bool = True, tokenizer: Any = None, authority: str = "", **options: Any
) -> AsyncIterator[World]:
    """A gateway with these options, ready unless told otherwise; with TLS ``authority`` is the file of who vouches."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    defaults = {"name": "test", "scheduler": scheduler.endpoint, "backend": "fake", "served_model_name": "fake-model"}
    keys = options.pop("api_keys", ())
    known = tuple(plain_key(each) if isinstance(each, str) else each for each in keys)
    gateway_options = GatewayOptions(**{**defaults, **options}, api_keys=known)
    gateway = Gateway(gateway_options, tokenizer or load_tokenizer(gateway_options))
    server = http_server(gateway)
    gateway.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    tls = ssl.create_default_context(cafile=authority) if authority else None
    url = f"http{'s' if tls else ''}://127.0.0.1:{port}"
    key = keys[0] if keys and isinstance(keys[0], str) else "none"
    try:
        await await_until(lambda: server.started, 5, "the HTTP server listens")
        if wait_ready:
            await await_until(lambda: gateway.link.ready, 5, "the gateway is ready")
        async with (
            httpx.AsyncClient(base_url=url, timeout=20, verify=tls or True) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=20) as client,
        ):
            yield World(scheduler, gateway, url, port, http, client, tls)
    finally:
        server.should_exit = server.force_exit = True
        await serving
        await gateway.close()
        await scheduler.close()


def error_of(response: Any, param: str | None = None) -> dict[str, Any]:
    """The checked error object of a 400."""
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param, error
    return error


def events_of(body: str | bytes) -> list[Any]:
    """The data of each event of a stream, JSON decoded; ``[DONE]`` as a string. Comments are left out."""
    text = body.decode() if isinstance(body, bytes) else body
    assert text.endswith("\n\n"), text[-50:]
    parts = [part for part in text[:-2].split("\n\n") if not part.startswith(":")]
    assert all(part.startswith("data: ") and "\n" not in part for part in parts), text
    data = [part.removeprefix("data: ") for part in parts]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def text_of(events: list[Any], choice: int = 0) -> str:
    """The joined text of one choice of a stream."""
    pieces = []
    for event in events:
        for part in event.get("choices", ()) if isinstance(event, dict) else ():
            if part["index"] == choice:
                pieces.append(part["text"] if "text" in part else part["delta"].get("content", ""))
    return "".join(pieces)

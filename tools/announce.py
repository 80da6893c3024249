"""Finds out when a system that is starting can serve, and says so with a command to try.

Called by ``tools.up``. Imports the standard library only.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Iterator

_POLL_S = 0.1
_ANSWER_S = 2.0


def reachable(host: str) -> str:
    """An address that reaches what listens on ``host``: loopback for the addresses that mean all of them."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


async def wait_until_ready(host: str, port: int, *, tls: bool = False) -> None:
    """Return once ``GET /ready`` answers 200; asks for ever."""
    while True:
        with contextlib.suppress(OSError, TimeoutError):
            if await asyncio.wait_for(_status(host, port, "/ready", tls=tls), _ANSWER_S) == 200:
                return
        await asyncio.sleep(_POLL_S)


async def _status(host: str, port: int, path: str, *, tls: bool) -> int:
    """HTTP status of a GET; 0 when the answer is no HTTP."""
    # Our own child, by its address: its certificate is not for that, and nothing is told to it.
    context = ssl._create_unverified_context() if tls else None
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        words = (await reader.readline()).split()
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    finally:
        writer.close()


def ready_lines(
    host: str, port: int, model: str, executors: int, *, needs_key: bool, tls: bool = False
) -> Iterator[str]:
    """What the user sees once the system serves."""
    address = reachable(host)
    url = f"http{'s' if tls else ''}://{f'[{address}]' if ':' in address else address}:{port}"
    lifts = "1 executor" if executors == 1 else f"{executors} executors"
    yield f"Paternoster is ready: {model} on {lifts} at {url} - try:"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Tell me a joke."}}]}}'
    yield f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'"

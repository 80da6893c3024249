"""One gateway process from start to exit code: logging, the listening socket, signals, draining.

Called by ``tools``. Owns uvicorn's server; the rest is ``services.gateway.gateway``'s.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn
import uvloop

from services.gateway.app import create_app
from services.gateway.connection import Connection
from services.gateway.gateway import Gateway, load_tokenizer
from services.gateway.options import GatewayOptions
from services.gateway.text.tokenizer import Tokenizer
from shared import log
from shared import metrics as metrics_server
from shared.loop_lag import LoopLag
from shared.net.crash import Crash

_log = logging.getLogger(__name__)

MISCONFIGURED = os.EX_CONFIG
"""Exit code of a mistake that a restart will not mend."""
KEEP_ALIVE_S = 75
"""Longer than the 60 s after which proxies drop idle connections: the server must not be first."""
STALLED_CLIENT_MS = 60_000
"""A connection whose client takes nothing for so long is reset by the kernel."""
SHUTDOWN_S = 3
"""For answers on their way out after draining."""
YOUNG_OBJECTS = 20_000
"""How many more objects there are than at the last search for garbage when the next begins: half a millisecond's."""


def run(options: GatewayOptions) -> int:
    """Serve until told to stop; returns the exit code."""
    log.setup(options.name, options.log_level, options.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    _allow_many_connections()
    try:
        tokenizer = load_tokenizer(options)
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        _log.error("cannot read the tokenizer in %r: %s", options.model, error)
        return MISCONFIGURED
    try:
        listener = listening_socket(options)
    except OSError as error:
        _log.error("cannot listen on %s:%d: %s", options.host, options.port, error.strerror or error)
        return MISCONFIGURED
    with listener:
        return uvloop.run(serve(options, tokenizer, listener))


def _allow_many_connections() -> None:
    """Each stream is a descriptor, and the soft limit is 1,024 on most systems: for programs that still use select."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems name a limit that they do not allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def listening_socket(options: GatewayOptions) -> socket.socket:
    """The inherited socket, or a new one. Raises OSError."""
    if options.fd is not None:
        listener = socket.socket(fileno=options.fd)
    else:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        listener = socket.create_server((options.host, options.port), family=family, backlog=2048)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STALLED_CLIENT_MS)
    return listener


class Server(uvicorn.Server):
    """uvicorn's server, leaving signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: ``Stop`` has them."""
        yield


class Stop:
    """Signals: the first asks to drain, the second to end now."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        (self.now if self.asked.is_set() else self.asked).set()


async def serve(options: GatewayOptions, tokenizer: Tokenizer, listener: socket.socket) -> int:
    """Serve on ``listener`` until a signal; returns the exit code. Raises what broke the link's callbacks."""
    crash = Crash()
    stop = Stop()
    try:
        gateway = Gateway(options, tokenizer, crash.report)
        server = http_server(gateway)
    except ModuleNotFoundError as error:
        _log.error("traces need a package that is not installed: %s", error.name)
        return MISCONFIGURED
    except OSError as error:
        _log.error("cannot serve TLS with %s: %s", options.ssl_certfile, error)
        return MISCONFIGURED
    try:
        own_port = _metrics_server(gateway)
    except OSError as error:
        _log.error(
            "cannot serve metrics on %s:%s: %s", options.metrics_host, options.metrics_port, error.strerror or error
        )
        return MISCONFIGURED
    lag = LoopLag(gateway.metrics.registry)
    try:
        lag.start()
        gateway.start()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        _log.info("listening on %s", address_of(listener, tls=bool(options.ssl_certfile)))
        settle_collector()
        await _first(serving, asyncio.create_task(stop.asked.wait()), asyncio.create_task(crash.wait()))
        await _drain(gateway, server, stop)
        await serving
    finally:
        lag.stop()
        await gateway.close()
        if own_port is not None:
            own_port.close()
    return 0


def settle_collector() -> None:
    """Spare requests the search for garbage in cycles, of which they make little.

    A search through all that was loaded takes 40 ms, in which no stream gets a token. And what requests in flight hold
    is searched again and again: at Python's own threshold of 700 objects that is a sixth of what a request costs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def _metrics_server(gateway: Gateway) -> metrics_server.MetricsServer | None:
    options = gateway.options
    if options.metrics_port is None:
        return None
    registry = gateway.metrics.registry
    return metrics_server.serve(options.metrics_host, options.metrics_port, registry, lambda: (True, "ok"))


def http_server(gateway: Gateway) -> Server:
    """uvicorn as we want it: quiet, on the running loop, h1 only. Raises OSError for a certificate that is none."""
    options = gateway.options
    config = uvicorn.Config(
        create_app(gateway),
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        ssl_certfile=options.ssl_certfile or None,
        ssl_keyfile=options.ssl_keyfile or None,
        ssl_keyfile_password=options.ssl_keyfile_password or None,
    )
    config.load()
    return Server(config)


def address_of(listener: socket.socket, *, tls: bool) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http{'s' if tls else ''}://{f'[{host}]' if ':' in host else host}:{port}"


async def _first(*tasks: asyncio.Task[object]) -> None:
    """Wait for the first to end and raise what it raised; the first task is not cancelled, the others are."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks[1:]:
        task.cancel()
    for task in done:
        task.result()


async def _drain(gateway: Gateway, server: Server, stop: Stop) -> None:
    """Refuse new work, let live requests end within the time for it, then end them with an error."""
    gateway.draining = True
    requests = server.server_state.tasks
    _log.info("draining %d requests for up to %g s", len(requests), gateway.options.drain_timeout_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(gateway.options.drain_timeout_s):
            await _until_done(requests, stop.now)
    gateway.streams.fail_all("the server is shutting down")
    server.should_exit = True
    server.force_exit = stop.now.is_set()


async def _until_done(tasks: set[asyncio.Task[None]], enough: asyncio.Event) -> None:
    """Wait until the set, which shrinks and grows, is empty; or until ``enough``."""
    stopper = asyncio.create_task(enough.wait())
    try:
        while tasks and not enough.is_set():
            await asyncio.wait([stopper, *tasks], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopper.cancel()

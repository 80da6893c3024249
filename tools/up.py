"""``paternoster up``: a whole system as child processes of this one, from the model's files to the last drained stream.

Called by ``tools.main``. The children are started through the same command line, one process each; this process never
imports a service, only starts it.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from typing import Any

from shared import log
from tools import announce, model
from tools.child import Child, ChildSpec
from tools.ports import LOOPBACK, LinkPorts, PortError, check_distinct, check_free, listen
from tools.processes import (
    UpOptions,
    asked_ports,
    child_specs,
    children_environment,
    command,
    metrics_ports,
    served_name,
)
from tools.supervisor import Supervisor

_LOG = logging.getLogger("supervisor")
_LEAVE_GRACE_S = 5.0
"""How long a child may take to leave, beyond what its streams may take to drain."""
_COMPLAINT = "paternoster: error: "
"""How a command's last line begins when it fails."""


class StartError(Exception):
    """The system cannot start; the message is the user's last line."""


def run(options: UpOptions) -> int:
    """Run the system until a signal or a child that cannot start ends it; returns the exit code."""
    log.setup("up", options.logging.log_level, options.logging.log_format)
    try:
        check_distinct(asked_ports(options))
        with listen(options.host, options.port) as http, LinkPorts(options.link_port) as links:
            check_free(LOOPBACK, metrics_ports(options))
            return asyncio.run(_run(options, http, links))
    except (PortError, StartError) as error:
        print(f"{_COMPLAINT}{error}", file=sys.stderr)
        return 1


async def _run(options: UpOptions, http: socket.socket, links: LinkPorts) -> int:
    loop = asyncio.get_running_loop()
    first: asyncio.Future[int] = loop.create_future()
    second: asyncio.Future[int] = loop.create_future()

    def on_signal(number: int) -> None:
        waiting = second if first.done() else first
        if not waiting.done():
            waiting.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    supervisor = Supervisor(children_environment(), _write, _LOG.info, _LOG.warning)
    life = asyncio.create_task(_live(options, http, links, supervisor, first))
    endings: list[asyncio.Future[Any]] = [life, second]
    await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
    if life.done():
        return life.result()
    life.cancel()
    await supervisor.kill_all()
    with contextlib.suppress(asyncio.CancelledError):
        await life
    return 128 + second.result()


async def _live(
    options: UpOptions, http: socket.socket, links: LinkPorts, supervisor: Supervisor, ended: asyncio.Future[int]
) -> int:
    """From the model's files to the end of the drain; returns the exit code."""
    folder = await _model_folder(options, ended)
    if ended.done():
        return 128 + ended.result()
    specs = list(child_specs(options, folder, http, links))
    for spec in specs:
        supervisor.keep_running(spec)
    waiting_for_ready = asyncio.create_task(_announce(options, http, supervisor))
    endings: list[asyncio.Future[Any]] = [ended, supervisor.gave_up]
    await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
    waiting_for_ready.cancel()
    if ended.done():
        _LOG.info(
            "draining: running streams may take %g s to finish; a second signal ends them now", options.drain_timeout
        )
    gateways = [spec.name for spec in specs if spec.name.startswith("gateway")]
    clean = await supervisor.stop(gateways, options.drain_timeout + _LEAVE_GRACE_S)
    executors = [spec.name for spec in specs if spec.name.startswith("executor")]
    clean &= await supervisor.stop(executors, _LEAVE_GRACE_S)  # they leave by the scheduler's leave
    clean &= await supervisor.stop(
        [spec.name for spec in specs if spec.name not in gateways + executors], _LEAVE_GRACE_S
    )
    if supervisor.gave_up.done():
        raise StartError(str(supervisor.gave_up.result()))
    return 0 if clean else 1


async def _announce(options: UpOptions, http: socket.socket, supervisor: Supervisor) -> None:
    host, port = http.getsockname()[:2]
    tls = bool(options.http.ssl_certfile)
    await announce.wait_until_ready(announce.reachable(host), port, tls=tls)
    supervisor.now_ready()
    needs_key = bool(options.access.api_key or options.access.api_key_file)
    for line in announce.ready_lines(host, port, served_name(options), options.executors, needs_key=needs_key, tls=tls):
        with contextlib.suppress(OSError):  # nobody listens; the system serves all the same
            print(line, flush=True)


async def _model_folder(options: UpOptions, ended: asyncio.Future[int]) -> str:
    """The folder that every service reads, fetched and converted in a process of its own; empty for the fake backend.

    Returns early when ``ended`` is set. Raises StartError.
    """
    if options.backend == "fake":
        return ""
    spec = ChildSpec("model", command("model", "fetch", options.model))
    child = await Child.start(spec, children_environment(), _write_of_model)
    waiting = asyncio.create_task(child.wait())
    try:
        endings: list[asyncio.Future[Any]] = [waiting, ended]
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            child.terminate()
            await asyncio.wait([waiting], timeout=_LEAVE_GRACE_S)
    finally:
        child.kill()
    code = await waiting
    if code and not ended.done():
        raise StartError(f"no model to serve: {child.last_line.removeprefix(_COMPLAINT)}")
    return "" if ended.done() else str(model.cached(options.model, _LOG.info))


def _write_of_model(line: str) -> None:
    if _COMPLAINT not in line:  # it is this process's last line, too
        _write(line)


def _write(line: str) -> None:
    """A child's line goes into the one log; that nobody reads the log any more is no reason to stop serving."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)

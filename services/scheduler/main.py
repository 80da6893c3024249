"""A scheduler process from start to end. Called by the command line; owns signals, metrics and the exit code."""

import asyncio
import concurrent.futures
import ipaddress
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

import uvloop
import zmq
from prometheus_client import CollectorRegistry

from services.scheduler.core.limits import Policy, Settings
from services.scheduler.core.machine import Scheduler
from services.scheduler.journal import Journal
from services.scheduler.metrics import CoreCollector, Figures, StepMetrics
from services.scheduler.options import SchedulerOptions
from services.scheduler.request_metrics import RequestMetrics
from services.scheduler.shell import Shell
from services.scheduler.traces import Traces
from shared import log as logs
from shared import metrics as metrics_server
from shared.loop_lag import LoopLag
from shared.net.crash import Crash
from shared.tracing import Tracing, tracing

_log = logging.getLogger(__name__)

EXIT_STOPPED = 0
EXIT_CRASHED = 1
EXIT_CONFIGURATION = 78
"""sysexits.h EX_CONFIG: a restart will not mend it."""

LOOP_ANSWER_S = 2.0
"""How long a scrape or a health check waits for the event loop."""
FLUSH_EVERY_S = 0.5
"""How often the journal is handed to the operating system."""


class _Misconfigured(Exception):
    """The user's mistake, in one line."""


def run(options: SchedulerOptions) -> int:
    """Run a scheduler until it is told to stop. Returns the process's exit code."""
    logs.setup("scheduler", options.log_level, options.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(options))
    except _Misconfigured as error:
        _log.error("%s", error)
        return EXIT_CONFIGURATION
    except Exception as error:
        # Nothing is lost: executors rejoin the next scheduler, and gateways submit their live streams to it again.
        _log.critical("the scheduler crashed: %s: %s", type(error).__name__, error)
        return EXIT_CRASHED


async def _serve(options: SchedulerOptions) -> int:
    """Serve until a signal (returns the exit code) or a crash (raises it)."""
    loop = asyncio.get_running_loop()
    crash = Crash()
    crash.watch(loop)
    stopped = _on_signals(loop)
    registry = CollectorRegistry()
    core = Scheduler(epoch=time.time_ns() // 1_000_000, settings=_settings(options))
    journal = _open_journal(options, core)
    traces = _traces(options, registry)
    watched = Traces(traces) if traces is not None else None
    watchers = [RequestMetrics(registry)]
    shell = Shell(core, StepMetrics(registry), crash.report, journal, watchers, options.keys, watched)
    lag = LoopLag(registry)
    lag.start()
    flushing = asyncio.create_task(_keep_flushed(journal)) if journal is not None else None
    server: metrics_server.MetricsServer | None = None
    ends: list[asyncio.Future[int]] = [asyncio.ensure_future(crash.wait()), stopped]
    try:
        gateways, executors = _bind(shell, options)
        server = _serve_metrics(options, registry, loop, shell)
        _log.info("epoch %d: gateways at %s, executors at %s", core.epoch, gateways, executors)
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return next(end for end in ends if end in done).result()
    finally:
        for end in ends:
            end.cancel()
        lag.stop()
        if server is not None:
            await asyncio.to_thread(server.close)  # a scrape in progress may be waiting for the loop
        await shell.close()
        if traces is not None:
            await asyncio.to_thread(traces.close)
        if journal is not None and flushing is not None:
            flushing.cancel()
            journal.close()


def _traces(options: SchedulerOptions, registry: CollectorRegistry) -> Tracing | None:
    try:
        return tracing(options.otlp_endpoint, "scheduler", "scheduler", registry)
    except ModuleNotFoundError as error:
        raise _Misconfigured(f"traces need a package that is not installed: {error.name}") from error


def _open_journal(options: SchedulerOptions, core: Scheduler) -> Journal | None:
    if not options.journal:
        return None
    try:
        return Journal(Path(options.journal), core, options.journal_redact)
    except OSError as error:
        raise _Misconfigured(f"cannot write the journal {options.journal}: {error}") from error


async def _keep_flushed(journal: Journal) -> None:
    """So that a kill costs the journal no more than the last moment."""
    while True:
        await asyncio.sleep(FLUSH_EVERY_S)
        journal.flush()


def _settings(options: SchedulerOptions) -> Settings:
    try:
        return Settings(
            max_inflight=options.max_inflight,
            max_step_tokens=options.max_step_tokens,
            recovery_timeout_ms=round(options.recovery_timeout_s * 1000),
            step_timeout_ms=round(options.step_timeout_s * 1000),
            max_queue=options.max_queue,
            max_queue_tokens=options.max_queue_tokens,
            ttft_limit_ms=options.ttft_limit_ms,
            ageing_ms=options.ageing_ms,
            tenant_weights=dict(options.tenant_weights),
            prefix_cache=options.prefix_cache,
            policy=_policy(options.policy),
            static_batch_size=options.static_batch_size,
            static_wait_ms=options.static_wait_ms,
        )
    except ValueError as error:
        raise _Misconfigured(str(error)) from error


def _policy(name: str) -> Policy:
    for policy in get_args(Policy):
        if policy == name:
            return cast(Policy, policy)
    raise ValueError(f"the policy is one of {', '.join(get_args(Policy))}, not {name}")


def _bind(shell: Shell, options: SchedulerOptions) -> tuple[str, str]:
    try:
        addresses = shell.bind(options.gateways_endpoint, options.executors_endpoint)
    except zmq.ZMQError as error:
        raise _Misconfigured(
            f"cannot listen on {options.gateways_endpoint} and {options.executors_endpoint}: {error}"
        ) from error
    for address in addresses:
        if options.keys is None and not _is_loopback(address):
            _log.warning("%s is open to whoever reaches it: keep it in a private network, or give keys", address)
    return addresses


def _is_loopback(address: str) -> bool:
    """Whether only this machine reaches a ZeroMQ address that was bound."""
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return not address.startswith("tcp://") or ipaddress.ip_address(host).is_loopback


def _on_signals(loop: asyncio.AbstractEventLoop) -> "asyncio.Future[int]":
    """The future that SIGTERM or SIGINT resolves; a second signal ends the process at once."""
    stopped: asyncio.Future[int] = loop.create_future()

    def signalled() -> None:
        if stopped.done():
            os._exit(EXIT_CRASHED)
        _log.info("stopping")
        stopped.set_result(EXIT_STOPPED)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    return stopped


def _serve_metrics(
    options: SchedulerOptions, registry: CollectorRegistry, loop: asyncio.AbstractEventLoop, shell: Shell
) -> metrics_server.MetricsServer | None:
    if options.metrics_port is None:
        return None
    figures = LoopReader(loop, shell.figures)
    registry.register(CoreCollector(figures.read))
    try:
        server = metrics_server.serve(options.host, options.metrics_port, registry, figures.health)
    except OSError as error:
        raise _Misconfigured(f"cannot serve metrics on {options.host}:{options.metrics_port}: {error}") from error
    _log.info("metrics are on http://%s:%d/metrics", options.host, server.port)
    return server


class LoopReader:
    """Lets the metrics server's threads read figures that belong to the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, read: Callable[[], Figures], answer_s: float = LOOP_ANSWER_S
    ) -> None:
        self._loop = loop
        self._read = read
        self._answer_s = answer_s
        self._last = read()

    def read(self) -> Figures:
        """Fresh figures; the last ones while the loop is busy for longer than ``answer_s``."""
        answer: concurrent.futures.Future[Figures] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(lambda: answer.set_result(self._read()))
        try:
            self._last = answer.result(self._answer_s)
        except TimeoutError:
            _log.warning("the event loop has not answered a scrape within %g s", self._answer_s)
        return self._last

    def health(self) -> tuple[bool, str]:
        """Whether the event loop turns."""
        turned: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(turned.set_result, None)
        try:
            turned.result(self._answer_s)
        except TimeoutError:
            return False, f"the event loop has not answered within {self._answer_s:g} s"
        return True, "ok"

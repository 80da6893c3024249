"""An executor process from start to end: load, warm up, join the scheduler, run until told to stop.

Called by the command line. The model is loaded in the compute thread before the first hello, so that signals and
``/health`` are answered meanwhile and nobody sends work to an executor that is not ready for it.
"""

import asyncio
import importlib
import logging
import os
import signal
import sys
import threading
import time
from functools import partial

import msgspec
import uvloop

from services.executor.backend import Backend
from services.executor.compute import Compute
from services.executor.metrics import ExecutorMetrics
from services.executor.options import ExecutorOptions
from services.executor.shell import Shell
from services.executor.traces import Traces
from shared import log as logs
from shared import metrics as metrics_server
from shared.loop_lag import LoopLag
from shared.net.crash import Crash
from shared.tracing import Tracing, tracing
from shared.wire.facts import ExecutorLimits

log = logging.getLogger(__name__)

EXIT_STOPPED = 0
EXIT_CRASHED = 1
EXIT_CONFIGURATION = 78
"""sysexits.h EX_CONFIG: a restart will not mend it."""

BACKENDS = {"torch": "services.executor.backends.torch_backend", "fake": "services.executor.backends.fake"}
LEAVE_S = 0.2
"""How long a running step is waited for at the end."""


class _Misconfigured(Exception):
    """The user's mistake, in one line."""


def run(options: ExecutorOptions) -> int:
    """Run an executor until it is told to stop. Returns the process's exit code."""
    logs.setup(options.name, options.log_level, options.log_format)
    executor = _Executor(options)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(executor.run())
    except _Misconfigured as error:
        log.error("%s", error)
        code = EXIT_CONFIGURATION
    except Exception as error:
        log.critical("the executor crashed: %s: %s", type(error).__name__, error, exc_info=error)
        code = EXIT_CRASHED
    if not executor.compute_ended() or threading.active_count() > 1 or "torch" in sys.modules:
        # A thread may be in the middle of a step, of loading or of compiling a constraint. Python could only end by
        # waiting for it, and one that comes back from native code while Python ends brings the process down. Taking
        # torch down takes Python more than a second, for nothing.
        logging.shutdown()
        os._exit(code)
    return code


class _Executor:
    """What lives as long as the process."""

    def __init__(self, options: ExecutorOptions) -> None:
        self._options = options
        self._metrics = ExecutorMetrics()
        self._compute: Compute | None = None
        self._shell: Shell | None = None
        self._tracing: Tracing | None = None
        self._signals = 0

    def compute_ended(self) -> bool:
        """Let the compute thread end. False when it does not."""
        return self._compute is None or self._compute.close(LEAVE_S)

    async def run(self) -> int:
        """Load, serve, leave. Returns the exit code; raises what crashed."""
        crash = Crash()
        crash.watch(asyncio.get_running_loop())
        stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, stopped)
        self._tracing = self._start_tracing()
        server = self._serve_metrics()
        lag = LoopLag(self._metrics.registry)
        lag.start()
        self._compute = Compute(crash.report)
        serving = asyncio.create_task(self._serve(self._compute, crash))
        crashing: asyncio.Future[int] = asyncio.ensure_future(crash.wait())
        ends: list[asyncio.Future[int]] = [crashing, serving, stopped]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(end for end in ends if end in done).result()
        finally:
            for end in ends:
                end.cancel()
            lag.stop()
            if self._shell is not None:
                await self._shell.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
            if server is not None:
                server.close()

    async def _serve(self, compute: Compute, crash: Crash) -> int:
        backend = await compute.call(partial(_load, self._options))
        traces = Traces(self._tracing) if self._tracing is not None else None
        self._shell = Shell(self._options, backend, compute, self._metrics, crash.report, traces)
        try:
            self._shell.start()
        except ValueError as error:
            raise _Misconfigured(str(error)) from error
        return await self._shell.ended

    def _start_tracing(self) -> Tracing | None:
        try:
            return tracing(self._options.otlp_endpoint, "executor", self._options.name, self._metrics.registry)
        except ModuleNotFoundError as error:
            raise _Misconfigured(f"traces need a package that is not installed: {error.name}") from error

    def _serve_metrics(self) -> metrics_server.MetricsServer | None:
        host, port = self._options.host, self._options.metrics_port
        if port is None:
            return None
        try:
            server = metrics_server.serve(host, port, self._metrics.registry, self._health)
        except OSError as error:
            raise _Misconfigured(f"cannot serve metrics on {host}:{port}: {error}") from error
        log.info("metrics are on http://%s:%d/metrics", host, server.port)
        return server

    def _health(self) -> tuple[bool, str]:
        if self._shell is None:
            return True, "loading the model"
        return True, "ready" if self._shell.connected else "looking for the scheduler"

    def _signalled(self, stopped: "asyncio.Future[int]") -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(EXIT_CRASHED)
        if self._shell is not None and self._shell.drain():
            log.info("leaving: what runs has %g s to end here", self._options.drain_timeout_s)
            return
        log.info("stopping")
        if not stopped.done():
            stopped.set_result(EXIT_STOPPED)


def _load(options: ExecutorOptions) -> Backend:
    """In the compute thread. Raises _Misconfigured for what the user can mend."""
    started = time.monotonic()
    try:
        module = importlib.import_module(BACKENDS[options.backend])
        backend: Backend = module.load(options, partial(log.info, "%s"))
        _check(backend.limits)
    except (ValueError, FileNotFoundError, NotADirectoryError, ModuleNotFoundError) as error:
        raise _Misconfigured(f"cannot load the {options.backend} backend: {error}") from error
    backend.warm_up()
    limits = backend.limits
    log.info(
        "%s on %s is ready after %.1f s: %d blocks of %d tokens, %d lanes, %d tokens a step",
        backend.facts.model,
        backend.device,
        time.monotonic() - started,
        limits.num_blocks,
        limits.block_size,
        limits.num_lanes,
        limits.max_step_tokens,
    )
    return backend


def _check(limits: ExecutorLimits) -> None:
    for name, value in msgspec.structs.asdict(limits).items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")

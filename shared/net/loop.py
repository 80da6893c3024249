"""Ties one ZeroMQ socket to the asyncio loop. Used by ``router`` and ``dealer``; knows nothing of sessions.

A ZeroMQ socket's file descriptor is edge-triggered: it becomes readable once when something happens inside the
socket, and any call on the socket (a send, too) may swallow that edge. So we read until EAGAIN whenever it fires, and
look again after each send. Everything runs in the loop's thread.
"""

import asyncio
import errno
from collections.abc import Callable
from typing import cast

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.net import curve

MESSAGES_PER_TURN = 128
"""Messages read before other callbacks of the loop get their turn."""

OnCrash = Callable[[BaseException], None]


class Callbacks:
    """Schedules callbacks on the running loop; what one raises goes to ``on_crash``, else to the loop's own handler."""

    def __init__(self, on_crash: OnCrash | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_crash = on_crash

    def now(self) -> float:
        """Seconds of the loop's monotonic clock."""
        return self._loop.time()

    def soon(self, callback: Callable[[], None]) -> asyncio.Handle:
        """Call once in the loop's next turn."""
        return self._loop.call_soon(self._run, callback)

    def later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call once after ``delay_s`` seconds."""
        return self._loop.call_later(delay_s, self._run, callback)

    def on_readable(self, fd: int, callback: Callable[[], None]) -> None:
        """Call whenever ``fd`` becomes readable."""
        self._loop.add_reader(fd, self._run, callback)

    def forget(self, fd: int) -> None:
        """Undo ``on_readable``."""
        self._loop.remove_reader(fd)

    def _run(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:
            if self._on_crash is None:
                raise
            self._on_crash(error)


class _Reader:
    """Reads one socket until EAGAIN and hands each message on."""

    def __init__(
        self, callbacks: Callbacks, socket: "zmq.Socket[bytes]", on_frames: Callable[[list[bytes]], None]
    ) -> None:
        self._callbacks = callbacks
        self._socket = socket
        self._on_frames = on_frames
        self._again: asyncio.Handle | None = None
        self._closed = False
        self._fd = cast(int, socket.getsockopt(zmq.FD))
        callbacks.on_readable(self._fd, self._turn)
        self.look_again()  # what came before we listened made no edge that we saw

    def look_again(self) -> None:
        """Read in the loop's next turn, edge or not."""
        if self._again is None:
            self._again = self._callbacks.soon(self._turn)

    def drain(self, most: int | None = None) -> bool:
        """Read up to ``most`` messages; True when nothing is left to read (or the reader was closed meanwhile)."""
        count = 0
        while most is None or count < most:
            if self._closed:
                return True
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._on_frames(frames)
            count += 1
        return False

    def close(self) -> None:
        self._closed = True
        self._callbacks.forget(self._fd)
        if self._again is not None:
            self._again.cancel()

    def _turn(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if not self.drain(MESSAGES_PER_TURN):
            self.look_again()


class LoopSocket:
    """A socket whose messages and closed connections arrive as callbacks. Owns the socket."""

    def __init__(
        self,
        callbacks: Callbacks,
        socket: "zmq.Socket[bytes]",
        on_frames: Callable[[list[bytes]], None],
        on_disconnect: Callable[[], None],
        on_no_handshake: Callable[[str], None],
    ) -> None:
        """``on_disconnect`` is called when any connection of the socket has been closed (not: refused),
        ``on_no_handshake`` with the reason before it when the connection was never open to messages."""
        self._socket = socket
        self._reader = _Reader(callbacks, socket, on_frames)
        self._monitor: zmq.Socket[bytes] = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | curve.EVENTS)
        self._on_disconnect = on_disconnect
        self._on_no_handshake = on_no_handshake
        self._monitor_reader = _Reader(callbacks, self._monitor, self._monitored)

    def send(self, frames: list[bytes]) -> str | None:
        """Send without waiting. Returns why it could not be sent, or None."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return "its pipe is full"
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return "it is gone"
        finally:
            self._reader.look_again()
        return None

    def drain(self) -> None:
        """Read all that has arrived."""
        self._reader.drain()

    def close(self, linger_ms: int) -> None:
        """Close; what was sent already has ``linger_ms`` to leave the machine while the context lives."""
        self._monitor_reader.close()
        self._reader.close()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def _monitored(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)["event"]
        if problem := curve.handshake_problem(event):
            self._on_no_handshake(problem)
        elif event == zmq.EVENT_DISCONNECTED:
            self._on_disconnect()

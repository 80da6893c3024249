"""A process of the gateway that renders chat templates which came with requests. ``python -m
services.gateway.template_process``; reads one ``Task`` a line, answers each with one ``Rendered``.

A template is a program, and one that a client wrote may never end or take all memory. So each is rendered in a fork
that has so much time and so much memory and no more; nothing of it is left for the next one. Asked by
``services.gateway.request_templates``.
"""

import os
import resource
import signal
import sys
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.text.chat_template import ChatTemplate, Conversation

CPU_S = 1.0
"""Processor time that a template may take."""
MEMORY_BYTES = 2**30
"""Of address space in all; the interpreter takes a part of it."""
MAX_CHARS = 8 * 1024 * 1024
"""Of what it makes."""
TOO_MUCH = f"it takes more than {CPU_S:g} s of processor time, or too much memory"


class Task(Struct, array_like=True):
    """What to render."""

    source: str
    special_tokens: dict[str, Any]
    conversation: Conversation


class Rendered(Struct, array_like=True):
    """What came of it."""

    text: str
    """Empty where there is a problem."""
    problem: str
    """Why there is no text; empty where there is."""


def main() -> None:
    """Serve until the gateway closes the pipe, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    decoder = msgspec.json.Decoder(Task)
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(_in_fork(decoder.decode(line)) + b"\n")
        sys.stdout.buffer.flush()


def _in_fork(task: Task) -> bytes:
    readable, writable = os.pipe()
    child = os.fork()
    if not child:
        _confine()
        with os.fdopen(writable, "wb") as pipe:
            pipe.write(msgspec.json.encode(render(task)))
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return msgspec.json.encode(Rendered("", TOO_MUCH)) if status else answer


def _confine() -> None:
    """The kernel ends what goes too far."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)


def render(task: Task) -> Rendered:
    """As the model's own template would be. Whatever goes wrong is the template's fault."""
    try:
        text = ChatTemplate(task.source, task.special_tokens).render(task.conversation)
    except MemoryError:
        return Rendered("", TOO_MUCH)
    except Exception as error:
        return Rendered("", str(error) or type(error).__name__)
    if len(text) > MAX_CHARS:
        return Rendered("", f"it makes more than {MAX_CHARS} characters")
    return Rendered(text, "")


if __name__ == "__main__":
    main()

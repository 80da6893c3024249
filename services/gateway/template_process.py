"""A process of the gateway that renders chat templates which came with requests. ``python -m
services.gateway.template_process``; reads one ``Task`` a line, answers each with one ``Rendered``.

A template is a program, and one that a client wrote may never end or take all memory. So each is rendered in a confined
fork; nothing of it is left for the next one. Asked by ``services.gateway.request_templates``.
"""

import signal
import sys
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.confined_fork import TOO_MUCH, in_confined_fork
from services.gateway.text.chat_template import ChatTemplate, Conversation

MAX_CHARS = 8 * 1024 * 1024
"""Of what it makes."""


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
        answer = in_confined_fork(partial(_answer, decoder.decode(line)))
        sys.stdout.buffer.write((answer or msgspec.json.encode(Rendered("", TOO_MUCH))) + b"\n")
        sys.stdout.buffer.flush()


def _answer(task: Task) -> bytes:
    try:
        return msgspec.json.encode(render(task))
    except UnicodeEncodeError:
        return msgspec.json.encode(Rendered("", "it makes half of a surrogate pair, which is no text"))


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

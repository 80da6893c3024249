"""What is known of one HTTP request beside what it says: for its end, in the log and the trace, and whether its client
is still there. Filled on the way; quotes nothing of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from starlette.types import Scope, Send

from services.gateway.ids import new_id
from shared.tracing import Span


@dataclass
class Note:
    """One request's; times are of perf_counter."""

    id: str = field(default_factory=new_id)
    """Our own: what its answer's id ends in, and its ``X-Request-Id`` unless the client brings one."""
    arrived: float = field(default_factory=perf_counter)
    first_text_at: float | None = None
    client_gone: bool = False
    on_gone: Callable[[], object] | None = None
    """Called when the client leaves."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For the log: prompt and output tokens, finish reasons."""
    span: Span | None = None
    """None: nobody traces it."""
    send_body: Send | None = None
    """Once the head is sent: bodies need no middleware (see ``direct``)."""

    def gone(self) -> None:
        """The client left: told by its connection, before the answer is complete."""
        self.client_gone = True
        if self.on_gone is not None:
            self.on_gone()

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first text sent."""
        return None if self.first_text_at is None else self.first_text_at - self.arrived


def note_of(scope: Scope) -> Note:
    """The request's note; made on first use."""
    state = scope.setdefault("state", {})
    if "note" not in state:
        state["note"] = Note()
    note = state["note"]
    assert isinstance(note, Note)
    return note

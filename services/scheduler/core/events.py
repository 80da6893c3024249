"""What can happen to the scheduler, as data. The shell makes events from sockets and timers; the journal writes them.

``gateway`` and ``executor`` are the identities of the peers (``role-name-nonce``). Events validate nothing beyond their
types: the machine treats whatever a peer says as possible.
"""

from msgspec import Struct

from shared.wire.executor import BatchFailed, BatchResult, ExecutorHello
from shared.wire.gateway import Submit


class GatewayJoined(Struct, frozen=True, array_like=True, tag="gateway_joined"):
    """A gateway said hello; it holds no requests here."""

    gateway: str


class GatewayLeft(Struct, frozen=True, array_like=True, tag="gateway_left"):
    """A gateway's session is over; nobody waits for its requests any more."""

    gateway: str


class Submitted(Struct, frozen=True, array_like=True, tag="submitted"):
    """A gateway wants a request served."""

    gateway: str
    submit: Submit


class Cancelled(Struct, frozen=True, array_like=True, tag="cancelled"):
    """A gateway wants a request ended; unknown ids and repeats are harmless."""

    gateway: str
    request_id: str


class ExecutorJoined(Struct, frozen=True, array_like=True, tag="executor_joined"):
    """An executor said hello; all its lanes are empty."""

    executor: str
    hello: ExecutorHello


class ExecutorLeft(Struct, frozen=True, array_like=True, tag="executor_left"):
    """An executor's session is over (silence, goodbye, its pipe full)."""

    executor: str
    why: str


class ExecutorDraining(Struct, frozen=True, array_like=True, tag="executor_draining"):
    """An executor wants to leave; its requests may take ``within_ms`` to end there."""

    executor: str
    within_ms: int


class StepDone(Struct, frozen=True, array_like=True, tag="step_done"):
    """An executor ran a step."""

    executor: str
    result: BatchResult


class StepFailed(Struct, frozen=True, array_like=True, tag="step_failed"):
    """An executor could not run a step."""

    executor: str
    failed: BatchFailed


class TimePassed(Struct, frozen=True, array_like=True, tag="time_passed"):
    """Nothing happened but time; sent at ``Scheduler.next_deadline_ms()``."""


Event = (
    GatewayJoined
    | GatewayLeft
    | Submitted
    | Cancelled
    | ExecutorJoined
    | ExecutorLeft
    | ExecutorDraining
    | StepDone
    | StepFailed
    | TimePassed
)

"""What the scheduler wants done, as data. The shell carries actions out strictly in order."""

from msgspec import Struct

from shared.wire.executor import ToExecutor as ExecutorMessage
from shared.wire.gateway import ToGateway as GatewayMessage


class ToGateway(Struct, frozen=True, array_like=True, tag="to_gateway"):
    """Send a message to a gateway. A ``GatewayWelcome`` opens its session."""

    gateway: str
    message: GatewayMessage


class ToExecutor(Struct, frozen=True, array_like=True, tag="to_executor"):
    """Send a message to an executor. An ``ExecutorWelcome`` opens its session."""

    executor: str
    message: ExecutorMessage


class RefuseExecutor(Struct, frozen=True, array_like=True, tag="refuse_executor"):
    """Answer an executor's hello with a refusal."""

    executor: str
    reason: str


class DropExecutor(Struct, frozen=True, array_like=True, tag="drop_executor"):
    """End an executor's session from this side; the core has already forgotten it. No ExecutorLeft need follow."""

    executor: str
    why: str


Action = ToGateway | ToExecutor | RefuseExecutor | DropExecutor

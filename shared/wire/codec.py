"""Bytes to messages and back. Any bytes give a message or a ``DecodeError``, nothing else.

Decoding is done in two steps: ``msgpack`` unpacks under length limits that follow from the frame's own size, then
``msgspec`` checks the result into the typed struct.
"""

from typing import Any, Generic, TypeVar, get_args

import msgpack
import msgspec

from shared.wire import executor, gateway

Message = TypeVar("Message")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Larger frames are refused unread; the longest honest message is a Submit of a full context (4 bytes a token)."""

MAX_ITEMS = 65_536
"""Longest array inside a message; the longest honest ones have an item per request. What is hot is a column instead."""


class DecodeError(ValueError):
    """The peer sent bytes that are no message of this link."""


def encode(message: msgspec.Struct) -> bytes:
    """Encode one message as MessagePack: an array whose first item is the message's tag."""
    return msgspec.msgpack.encode(message)


class Decoder(Generic[Message]):
    """Decodes the messages of one direction of one link."""

    def __init__(self, messages: Any) -> None:
        """``messages`` is the union of those that it knows."""
        # By tag: msgspec would find out what is in the union anew with each message, at ten times the cost.
        self._kinds: dict[str, Any] = {kind.__struct_config__.tag: kind for kind in get_args(messages)}

    def decode(self, data: bytes) -> Message:
        """Return the message in ``data``. Raises DecodeError."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise DecodeError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        try:
            # No message has maps or extension types. An array's claimed length is allocated before its items are read.
            plain = msgpack.unpackb(
                data, raw=False, max_array_len=min(len(data), MAX_ITEMS), max_map_len=0, max_ext_len=0
            )
            # A string is never bytes (without builtin_types it would be read as base64).
            message: Message = msgspec.convert(plain, self._kind_of(plain), builtin_types=(bytes,))
        except (ValueError, OverflowError, RecursionError, msgpack.UnpackException) as error:
            raise DecodeError(f"{type(error).__name__}: {error}") from error
        return message

    def _kind_of(self, plain: Any) -> Any:
        """The message whose tag this begins with. Raises ValueError."""
        if isinstance(plain, list) and plain and isinstance(plain[0], str) and plain[0] in self._kinds:
            return self._kinds[plain[0]]
        raise ValueError("no message of this link")


gateway_to_scheduler: Decoder[gateway.ToScheduler] = Decoder(gateway.ToScheduler)
scheduler_to_gateway: Decoder[gateway.ToGateway] = Decoder(gateway.ToGateway)
executor_to_scheduler: Decoder[executor.ToScheduler] = Decoder(executor.ToScheduler)
scheduler_to_executor: Decoder[executor.ToExecutor] = Decoder(executor.ToExecutor)

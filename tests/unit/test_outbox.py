"""What goes out after one event."""

from services.scheduler.core.outbox import Outbox
from shared.wire import codec
from shared.wire.gateway import Delta, Tokens


def test_more_deltas_than_a_message_may_hold_are_several_messages() -> None:
    outbox = Outbox()
    number = codec.MAX_ITEMS + 3
    outbox.deltas("g").extend(Delta(str(i), b"\1\0\0\0") for i in range(number))
    outbox.deltas("nothing for this one")
    messages = [action.message for action in outbox.flush()]
    assert [len(message.items) for message in messages if isinstance(message, Tokens)] == [codec.MAX_ITEMS, 3]
    read = [codec.scheduler_to_gateway.decode(codec.encode(message)) for message in messages]
    assert [delta.request_id for message in read for delta in message.items] == [str(i) for i in range(number)]
    assert not outbox.flush()

"""The actions of one handled event, in order, and the deltas that go out with them. Used by all parts of the core."""

from services.scheduler.core.actions import Action, ToGateway
from shared.wire.codec import MAX_ITEMS
from shared.wire.gateway import Delta, Tokens


class Outbox:
    """Collects actions; ``flush`` closes them with a ``Tokens`` message for each gateway that gets any."""

    __slots__ = ("_actions", "_deltas")

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self._deltas: dict[str, list[Delta]] = {}

    def put(self, action: Action) -> None:
        """Add an action."""
        self._actions.append(action)

    def deltas(self, gateway: str) -> list[Delta]:
        """The gateway's list of deltas, to append to."""
        deltas = self._deltas.get(gateway)
        if deltas is None:
            deltas = self._deltas[gateway] = []
        return deltas

    def forget(self, gateway: str) -> None:
        """The gateway is gone: its deltas are nobody's."""
        self._deltas.pop(gateway, None)

    def flush(self) -> list[Action]:
        """All actions since the last flush; plans come before deltas, so that executors wait least."""
        for gateway, deltas in self._deltas.items():
            for start in range(0, len(deltas), MAX_ITEMS):  # one message, but for very many streams
                self._actions.append(ToGateway(gateway, Tokens(deltas[start : start + MAX_ITEMS])))
        actions, self._actions, self._deltas = self._actions, [], {}
        return actions

"""Choices of one prompt: the first computes it, the others are held back until its blocks can be found, and share them.

Called by ``ledger``. A group lasts until its leader's prompt is published, so whoever comes too late for it leads a new
one and finds the whole prompt at once. Should the leader end before, the next one takes its place.
"""

from services.scheduler.core.request import Request

Key = tuple[str, str]


class Group:
    """A leader, and who waits for it in order of arrival."""

    __slots__ = ("followers", "leader")

    def __init__(self, leader: Request) -> None:
        self.leader = leader
        self.followers: dict[Request, None] = {}


class Siblings:
    """All groups whose prompt is not computed yet."""

    __slots__ = ("_groups", "num_held")

    def __init__(self) -> None:
        self._groups: dict[Key, Group] = {}
        self.num_held = 0
        """Requests that are held back."""

    def held(self) -> list[Request]:
        """A copy, for checks."""
        return [request for group in self._groups.values() for request in group.followers]

    def hold_back(self, request: Request) -> bool:
        """Hold a request back if a sibling is on its way to compute their prompt; if none is, it leads.

        One that ran before is not held back.
        """
        group = self._groups.get(_key(request))
        if group is None:
            self._groups[_key(request)] = Group(request)
            request.leads = True
        if group is None or group.leader is request or request.cached >= 0:
            return False
        group.followers[request] = None
        self.num_held += 1
        return True

    def release(self, leader: Request) -> list[Request]:
        """The leader's prompt can be found, or there is no use in waiting for it: all may go on."""
        leader.leads = False
        followers = self._groups.pop(_key(leader)).followers
        self.num_held -= len(followers)
        return list(followers)

    def discard(self, request: Request) -> bool:
        """Take out a request that is held back; False if it is not."""
        group = self._groups.get(_key(request))
        if group is None or request not in group.followers:
            return False
        del group.followers[request]
        self.num_held -= 1
        return True

    def succeed(self, leader: Request) -> Request | None:
        """The leader has ended: the next in line is held back no more and leads, if there is one."""
        key = _key(leader)
        leader.leads = False
        group = self._groups.pop(key)
        heir = next(iter(group.followers), None)
        if heir is not None:
            del group.followers[heir]
            self.num_held -= 1
            group.leader, heir.leads = heir, True
            self._groups[key] = group
        return heir


def _key(request: Request) -> Key:
    return request.gateway, request.submit.group

"""Waiting requests of one priority, fair between tenants by the tokens served to each. Called by ``waiting``.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (arXiv 2401.00588): the next
request is that of the tenant with the smallest counter. A counter grows with the tokens served, over the tenant's
weight, and is lifted to the others' level when its tenant comes back from having nothing waiting, so that idle time
earns no credit. While two tenants both have requests waiting, the service they got differs by a bounded amount only.

Requests that have run before (preempted, lost, submitted again) go first, in order of rank: their turn had come.
"""

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.core.request import Rank, Request

INPUT_COST = 1.0
"""What a prompt token adds to a counter, when its request is first admitted (from a prefix cache or not)."""
OUTPUT_COST = 2.0
"""What an output token adds; the paper's weights."""

Key = tuple[float, int]
"""Order of the tenants: counter, then arrival of the first request."""


class Account:
    """What one tenant got within one priority, and what it waits for."""

    __slots__ = ("counter", "key", "num_tokens", "output_cost", "requests", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.counter = 0.0
        self.output_cost = OUTPUT_COST / weight
        """Added to the counter for each output token."""
        self.requests: list[Request] = []
        """Waiting ones that never ran, in order of arrival."""
        self.num_tokens = 0
        """Of their prompts."""
        self.key: Key | None = None
        """Under which it is in its queue's heap; never above its true place. None: not in the heap."""

    def input_cost(self, request: "Request") -> float:
        """What admitting a request for the first time adds to the counter."""
        return INPUT_COST * request.num_prompt / self.weight

    def place(self) -> Key:
        """Its place among the tenants of its queue."""
        return self.counter, self.requests[0].rank.ticket


class FairQueue:
    """One priority's waiting requests. Adding, taking out and looking at the next few never pass over all."""

    __slots__ = ("_heap", "_last", "accounts", "back", "num_live", "num_tokens", "num_waiting")

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        """By tenant."""
        self.back: list[Request] = []
        """Those that have run before, by rank."""
        self.num_live = 0
        """Live requests of the accounts; the counters are kept while there is one."""
        self.num_waiting = 0
        self.num_tokens = 0
        """Known ones of all that wait."""
        self._heap: list[tuple[Key, Account]] = []
        """Accounts with requests, by ``Account.key``. Counters only grow, so a key is mended when it comes up."""
        self._last: Account | None = None
        """The account whose requests were the last to leave."""

    def account(self, tenant: str, weight: float) -> Account:
        """The tenant's account."""
        account = self.accounts.get(tenant)
        if account is None:
            account = self.accounts[tenant] = Account(weight)
        return account

    def push(self, request: "Request") -> None:
        """Add a request at its place; a tenant that had none waiting gets no credit for it."""
        self.num_waiting += 1
        self.num_tokens += len(request.tokens)
        if not request.rank.fresh:
            insort(self.back, request, key=_rank)
            return
        account = request.account
        assert account is not None, "a request waits without an account"
        if not account.requests:
            account.counter = self._entry(account)
        insort(account.requests, request, key=_rank)
        account.num_tokens += request.num_prompt
        self._enter(account)

    def remove(self, request: "Request") -> bool:
        """Take a request out; False if it is not in."""
        account = request.account
        requests = self.back if not request.rank.fresh else account.requests if account is not None else []
        index = bisect_left(requests, request.rank, key=_rank)
        if index == len(requests) or requests[index] is not request:
            return False
        del requests[index]
        self.num_waiting -= 1
        self.num_tokens -= len(request.tokens)
        if request.rank.fresh and account is not None:
            account.num_tokens -= request.num_prompt
            if not requests:
                self._last = account
        return True

    def ahead(self, tenant: str, weight: float) -> tuple[int, float]:
        """Requests and tokens that go before a new one of the tenant, about: outputs are not foreseen."""
        account = self.accounts.get(tenant) or Account(weight)
        counter = account.counter if account.requests else self._entry(account)
        counter += INPUT_COST * account.num_tokens / account.weight
        num_requests = float(len(self.back) + len(account.requests))
        # Of those that have run all tokens, of the tenant's own too, of the others' what is due to them before.
        num_tokens = float(
            self.num_tokens - sum(other.num_tokens for other in self.accounts.values() if other is not account)
        )
        for other in self.accounts.values():
            if other is not account and other.requests:
                most = (counter - other.counter) * other.weight / INPUT_COST
                sooner = min(max(most, 0.0), float(other.num_tokens))
                num_tokens += sooner
                num_requests += len(other.requests) * sooner / other.num_tokens
        return round(num_requests), num_tokens

    def head(self, count: int) -> list["Request"]:
        """The first ``count`` requests, as if each of them were admitted in turn."""
        found = self.back[:count]
        counters: list[tuple[float, int, int, Account]] = []
        """Counter, ticket and number of the next request of those tenants looked at."""
        seen: list[Account] = []
        while len(found) < count:
            first = self._first()
            if first is not None and (not counters or first.place() < counters[0][:2]):
                heappop(self._heap)
                first.key = None
                seen.append(first)
                counter, ticket = first.place()
                heappush(counters, (counter, ticket, 0, first))
            if not counters:
                break
            counter, _, number, account = counters[0]
            if len(counters) == 1 and not self._heap:
                found += account.requests[number : number + count - len(found)]
                break
            request = account.requests[number]
            found.append(request)
            number += 1
            if number < len(account.requests):
                ticket = account.requests[number].rank.ticket
                heapreplace(counters, (counter + account.input_cost(request), ticket, number, account))
            else:
                heappop(counters)
        for account in seen:
            self._enter(account)
        return found

    def all(self) -> list["Request"]:
        """Every request, one tenant after the other; a copy."""
        return self.back + [request for account in self.accounts.values() for request in account.requests]

    def _entry(self, account: Account) -> float:
        """The counter with which an account that had nothing waiting comes in."""
        floor = self._first() or self._last
        return max(account.counter, floor.counter) if floor is not None else account.counter

    def _enter(self, account: Account) -> None:
        """Have the account in the heap at its place, or above it."""
        key = account.place()
        if account.key is None or key < account.key:
            account.key = key
            heappush(self._heap, (key, account))
        if len(self._heap) > 2 * len(self.accounts):
            self._heap = [(one.key, one) for one in self.accounts.values() if one.key is not None]
            heapify(self._heap)

    def _first(self) -> Account | None:
        """The waiting account with the smallest counter, now at the top of the heap."""
        heap = self._heap
        while heap:
            key, account = heap[0]
            if key != account.key:
                heappop(heap)
            elif not account.requests:
                account.key = None
                heappop(heap)
            elif (place := account.place()) != key:
                account.key = place
                heapreplace(heap, (place, account))
            else:
                return account
        return None


def _rank(request: "Request") -> "Rank":
    return request.rank

"""One request and the one table of what may happen to it. Made and moved by ``ledger``; imports nothing impure.

Progress is not a status: a request that runs is a lane whose ``computed`` chases what is known (see ``lanes``), so
chunked prefill, preemption and decode are one rule. The status only says who holds the request.
"""

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from services.scheduler.core.directory import Namespace
from services.scheduler.core.fairness import Account
from services.scheduler.core.prefix import Search
from shared.wire import tokens
from shared.wire.gateway import Submit, Usage

if TYPE_CHECKING:
    from services.scheduler.core.lanes import Lane
    from services.scheduler.core.quotas import Quota

STORY_LENGTH = 64
"""Entries of a story that are kept, the latest ones."""


class Status(Enum):
    """Who holds a request."""

    NEW = "new"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    ABANDONED = "abandoned"


class Verb(Enum):
    """What happens to a request."""

    ACCEPT = "accept"
    REJECT = "reject"
    ADMIT = "admit"
    PREEMPT = "preempt"
    LOSE = "lose"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"
    ABANDON = "abandon"


TRANSITIONS: dict[tuple[Status, Verb], Status] = {
    (Status.NEW, Verb.ACCEPT): Status.WAITING,
    (Status.NEW, Verb.REJECT): Status.REJECTED,
    (Status.WAITING, Verb.ADMIT): Status.RUNNING,
    (Status.WAITING, Verb.FINISH): Status.FINISHED,
    (Status.WAITING, Verb.FAIL): Status.FAILED,
    (Status.WAITING, Verb.CANCEL): Status.CANCELLED,
    (Status.WAITING, Verb.ABANDON): Status.ABANDONED,
    (Status.RUNNING, Verb.PREEMPT): Status.WAITING,
    (Status.RUNNING, Verb.LOSE): Status.WAITING,
    (Status.RUNNING, Verb.FINISH): Status.FINISHED,
    (Status.RUNNING, Verb.FAIL): Status.FAILED,
    (Status.RUNNING, Verb.CANCEL): Status.CANCELLED,
    (Status.RUNNING, Verb.ABANDON): Status.ABANDONED,
}
"""Every pair that may happen. ``docs/scheduling.md`` holds the same table; a test keeps the two equal."""


class IllegalTransition(AssertionError):
    """The scheduler's own mistake: told with the story of the request."""


class Rank(NamedTuple):
    """The one order of requests that run: who keeps a share of the budget, who is preempted last and comes back first.

    Requests that never ran are ordered by ``waiting``.
    """

    priority: int
    """Lower first. One that waited for too long runs at a lower one than it was submitted with."""
    fresh: int
    """0 once it has run (also before the scheduler was restarted), 1 before."""
    ticket: int
    """Number of the submit or, once it has run, of the first admission; unique."""


class Entry(NamedTuple):
    """One line of a story."""

    now_ms: int
    verb: Verb
    detail: str


class Request:
    """All the scheduler knows of one request; lives from its submit to its terminal message."""

    __slots__ = (
        "account",
        "cached",
        "charged",
        "failures",
        "gateway",
        "lane",
        "leads",
        "limit",
        "num_prompt",
        "numerics",
        "overtaken",
        "quota",
        "rank",
        "search",
        "status",
        "stop_token_ids",
        "stops",
        "story",
        "submit",
        "tokens",
        "untold",
        "waits_since_ms",
    )

    def __init__(self, gateway: str, submit: Submit, ticket: int) -> None:
        """Raises ValueError when a column is cut within an integer."""
        self.gateway = gateway
        self.submit = submit
        self.tokens: list[int] = tokens.unpack(submit.prompt)
        self.num_prompt = len(self.tokens)
        self.tokens += tokens.unpack(submit.output)
        self.rank = Rank(submit.priority, 0 if submit.resubmitted else 1, ticket)
        self.status = Status.NEW
        self.limit = 0
        """Most tokens, prompt and output together; 0 until an executor has said what it can hold."""
        self.stop_token_ids = tokens.unpack(submit.stop_token_ids)
        self.stops: frozenset[int] = frozenset()
        """Those and the model's end ids; empty until an executor has told them."""
        self.lane: Lane | None = None
        """Where it runs, while it runs."""
        self.account: Account | None = None
        """Who pays for it, from when it is accepted."""
        self.quota: Quota | None = None
        """What it counts against, from when it is accepted, if its tenant has limits."""
        self.charged = False
        """Its prompt is paid for."""
        self.failures = 0
        """Failed steps and lost executors in a row that it took part in without gaining a token."""
        self.overtaken = 0
        """Requests behind it that were admitted because it did not fit."""
        self.search: Search | None = None
        """What it found in prefix caches while it waits; None before it was looked for and while it runs."""
        self.cached = -1
        """Prompt tokens that its first admission found in a prefix cache; -1 before."""
        self.numerics = ""
        """Fingerprint of the executor that it was admitted to last."""
        self.leads = False
        """Siblings wait for it to compute their prompt, or would."""
        self.untold = False
        """Its gateway is still to be told of them, with its next tokens."""
        self.waits_since_ms = 0
        """When it came into the queue, the last time."""
        self.story: deque[Entry] = deque(maxlen=STORY_LENGTH)

    @property
    def num_output(self) -> int:
        """Output tokens so far, those before a resubmission included."""
        return len(self.tokens) - self.num_prompt

    def look_up(self) -> Search:
        """Its search of prefix caches, begun if need be; it waits."""
        if self.search is None:
            # Waiting requests are many, and most of them are as they came.
            column = tokens.pack(self.tokens) if self.num_output else self.submit.prompt
            self.search = Search(self.namespace, column)
        return self.search

    @property
    def namespace(self) -> Namespace:
        """Whose prefixes it may share."""
        return self.submit.tenant, self.submit.salt

    def move(self, verb: Verb, now_ms: int, detail: str = "") -> None:
        """Change the status as the table says. Raises IllegalTransition."""
        self.story.append(Entry(now_ms, verb, detail))
        status = TRANSITIONS.get((self.status, verb))
        if status is None:
            raise IllegalTransition(f"{verb.value} of a request that is {self.status.value}\n{self.tell()}")
        self.status = status

    def tell(self) -> str:
        """The story, one line an entry, without a single token of its text."""
        head = f"request {self.submit.request_id} of {self.gateway}: {self.status.value}, {self.num_prompt} prompt and "
        head += f"{self.num_output} output tokens, limit {self.limit}"
        lines = [f"  {entry.now_ms} ms: {entry.verb.value} {entry.detail}".rstrip() for entry in self.story]
        return "\n".join([head, *lines])

    def stops_with(self, token: int) -> bool:
        """Whether ``token``, already the last of the output, ends the request.

        Where a constraint allows nothing but an end, it comes whatever ``min_tokens`` says.
        """
        sampling = self.submit.sampling
        return token in self.stops and (self.num_output > sampling.min_tokens or sampling.constraint is not None)

    def usage(self) -> Usage:
        """Token counts for the terminal delta; the stop token counts."""
        return Usage(self.num_prompt, self.num_output, max(0, self.cached))

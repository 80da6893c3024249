"""What a tenant may ask of the system: requests and tokens a minute, and requests at once.

Called by ``ledger`` at submit and at a request's end, and by ``results`` for each token. The limits come with each
submit (``TenantLimits``), so they are the same through every gateway and known again after a restart; what was used of
them is here and nowhere else. Only a new submit is ever refused: one that was accepted counts, whatever the limits say.
"""

from itertools import islice
from typing import TYPE_CHECKING

from services.scheduler.core import overload
from services.scheduler.core.admission import Refusal
from shared.wire.gateway import TenantLimits

if TYPE_CHECKING:
    from services.scheduler.core.ledger import Ledger
    from services.scheduler.core.request import Request

MINUTE_MS = 60_000


class Bucket:
    """A token bucket that fills in a minute and holds a minute's worth; it may be overdrawn.

    In whole numbers: a millisecond adds ``per_minute`` units, and what is counted costs a minute's milliseconds.
    """

    __slots__ = ("_level", "_since_ms", "per_minute")

    def __init__(self, per_minute: int, now_ms: int) -> None:
        self.per_minute = per_minute
        self._level = per_minute * MINUTE_MS
        self._since_ms = now_ms

    def change(self, per_minute: int, now_ms: int) -> None:
        """Fill at another rate from now on. Nothing is gained by it at once."""
        self.take(0, now_ms)
        self.per_minute = per_minute
        self._level = min(self._level, per_minute * MINUTE_MS)

    def take(self, amount: int, now_ms: int) -> None:
        """Use ``amount``, whether or not it is there; a negative one is given back."""
        self._level = self._refilled(now_ms) - amount * MINUTE_MS
        self._since_ms = now_ms

    def wait_ms(self, amount: int, now_ms: int) -> int:
        """Until ``amount`` is there, or the bucket is full; 0 when it is so now."""
        missing = min(amount, self.per_minute) * MINUTE_MS - self._refilled(now_ms)
        return max(0, -(-missing // self.per_minute))

    def is_full(self, now_ms: int) -> bool:
        """Whether nothing is known of it that a new one would not know."""
        return self._refilled(now_ms) == self.per_minute * MINUTE_MS

    def _refilled(self, now_ms: int) -> int:
        return min(self.per_minute * MINUTE_MS, self._level + (now_ms - self._since_ms) * self.per_minute)


class Quota:
    """What one tenant has used of its limits."""

    __slots__ = ("limits", "live", "requests", "tokens")

    def __init__(self, limits: TenantLimits, now_ms: int) -> None:
        self.live: dict[Request, None] = {}
        """Accepted requests that have not ended."""
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.adopt(limits, now_ms)

    def adopt(self, limits: TenantLimits, now_ms: int) -> None:
        """Limits may change while a tenant is live: gateways are started one by one. The last word counts."""
        self.limits = limits
        self.requests = _bucket(self.requests, limits.requests_per_minute, now_ms)
        self.tokens = _bucket(self.tokens, limits.tokens_per_minute, now_ms)

    def is_unused(self, now_ms: int) -> bool:
        """Whether it can be forgotten."""
        return not self.live and all(bucket.is_full(now_ms) for bucket in (self.requests, self.tokens) if bucket)

    def count_token(self, now_ms: int) -> None:
        """A request of the tenant got a token."""
        if self.tokens is not None:
            self.tokens.take(1, now_ms)


class Quotas:
    """The quotas of all tenants that have limits."""

    __slots__ = ("by_tenant",)

    def __init__(self) -> None:
        self.by_tenant: dict[str, Quota] = {}

    def refusal(self, request: "Request", ledger: "Ledger") -> Refusal | None:
        """Why a new request is above its tenant's limits now, if it is."""
        limits = request.submit.limits
        if limits is None:
            return None
        quota, now_ms = self._of(request.submit.tenant, limits, ledger.now_ms), ledger.now_ms
        waits: list[tuple[int, str]] = []
        if limits.concurrency and len(quota.live) >= limits.concurrency:
            waits.append((overload.until_one_ends(quota.live, ledger), f"{limits.concurrency} requests at once"))
        if quota.requests is not None:
            waits.append((quota.requests.wait_ms(1, now_ms), f"{limits.requests_per_minute} requests a minute"))
        if quota.tokens is not None:
            wait_ms = quota.tokens.wait_ms(request.num_prompt, now_ms)
            waits.append((wait_ms, f"{limits.tokens_per_minute} tokens a minute"))
        wait_ms, what = max(waits, default=(0, ""))
        return Refusal("rate_limited", f"the limit of {what} is reached", wait_ms) if wait_ms else None

    def accepted(self, request: "Request", now_ms: int) -> None:
        """A request counts from here on. One that was submitted again has been charged in an earlier session."""
        limits = request.submit.limits
        if limits is None:
            return
        quota = request.quota = self._of(request.submit.tenant, limits, now_ms)
        quota.live[request] = None
        if not request.submit.resubmitted:
            _charge(quota, 1, request.num_prompt, now_ms)

    def ended(self, request: "Request", now_ms: int) -> None:
        """A request has ended; one that never ran has cost nothing."""
        quota = request.quota
        if quota is None:
            return
        del quota.live[request]
        if request.cached < 0 and not request.submit.resubmitted:
            _charge(quota, -1, -request.num_prompt, now_ms)

    def _of(self, tenant: str, limits: TenantLimits, now_ms: int) -> Quota:
        quota = self.by_tenant.get(tenant)
        if quota is None:
            self._tidy(now_ms)
            quota = self.by_tenant[tenant] = Quota(limits, now_ms)
        elif quota.limits != limits:
            quota.adopt(limits, now_ms)
        return quota

    def _tidy(self, now_ms: int) -> None:
        """Forget tenants that use nothing any more, two looked at for each that comes: never all at once."""
        for tenant in list(islice(self.by_tenant, 2)):
            quota = self.by_tenant.pop(tenant)
            if not quota.is_unused(now_ms):
                self.by_tenant[tenant] = quota  # last in the order from here on


def _bucket(before: Bucket | None, per_minute: int, now_ms: int) -> Bucket | None:
    if not per_minute:
        return None
    if before is None:
        return Bucket(per_minute, now_ms)
    before.change(per_minute, now_ms)
    return before


def _charge(quota: Quota, num_requests: int, num_tokens: int, now_ms: int) -> None:
    if quota.requests is not None:
        quota.requests.take(num_requests, now_ms)
    if quota.tokens is not None:
        quota.tokens.take(num_tokens, now_ms)

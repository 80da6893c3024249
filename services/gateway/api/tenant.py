"""Whose a request is: told by the guard that has seen its key, read by the endpoints. Pure data."""

from typing import NamedTuple

from starlette.types import Scope

from shared.wire.gateway import TenantLimits


class Tenant(NamedTuple):
    """Those who share a budget and a prefix cache: the holders of one key, or of several under one name."""

    name: str = ""
    """Stands for the key, which nobody else learns."""
    limits: TenantLimits | None = None

    @property
    def most_choices(self) -> int | None:
        """Choices that one HTTP request may ever ask for; each is a request to the scheduler. None is no limit."""
        if self.limits is None:
            return None
        return min(filter(None, (self.limits.requests_per_minute, self.limits.concurrency)), default=None)

    @property
    def most_prompt_tokens(self) -> int | None:
        """Of all choices of one HTTP request together, where it has several: later ones would never be taken."""
        return self.limits.tokens_per_minute or None if self.limits is not None else None


NOBODY = Tenant()
"""Everybody, where no keys are asked for."""


def be_tenant(scope: Scope, tenant: Tenant) -> None:
    """Note whose request it is."""
    scope.setdefault("state", {})["tenant"] = tenant


def tenant_in(scope: Scope) -> Tenant:
    """Whose request it is."""
    tenant = scope.get("state", {}).get("tenant", NOBODY)
    assert isinstance(tenant, Tenant)
    return tenant

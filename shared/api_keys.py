"""API keys as a gateway holds them: a hash, whose key it is and what that tenant may ask for; never the key itself.

Read by ``tools`` from options and from a file, before anything starts. Imports ``shared.wire`` and msgspec only.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shared.wire.gateway import TenantLimits

TENANT_CHARS = 16
"""Of a key's hash, for a key without a name: enough to tell keys apart, and nobody learns one from it."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Count = Annotated[int, Meta(ge=1, lt=2**31)]


class ApiKey(Struct, frozen=True):
    """One key. Several may have the same tenant, and then the same limits."""

    digest: bytes
    """SHA-256 of the key."""
    tenant: str
    limits: TenantLimits | None = None


class _Line(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a key file that is JSON."""

    key: str | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    """In place of ``key``: its hash, as hexadecimal digits."""
    name: Name | None = None
    weight: Annotated[float, Meta(ge=0.001, le=1000)] | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    concurrency: Count | None = None

    def limits(self) -> TenantLimits | None:
        counts = (self.requests_per_minute or 0, self.tokens_per_minute or 0, self.concurrency or 0)
        return TenantLimits(self.weight, *counts) if self.weight is not None or any(counts) else None


def digest_of(key: bytes) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256(key).digest()


def plain_key(key: str) -> ApiKey:
    """A key that is nothing but a key. Raises ValueError, which does not quote it."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("a key must be printable ASCII without spaces")
    digest = digest_of(key.encode())
    return ApiKey(digest, digest.hex()[:TENANT_CHARS])


def read_file(path: Path) -> tuple[ApiKey, ...]:
    """Every key of a file, see docs/operations.md. Raises OSError, and ValueError that names the line and no key."""
    keys = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if text and not text.startswith("#"):
            try:
                keys.append(_json_key(text) if text.startswith("{") else plain_key(text))
            except ValueError as error:  # msgspec's are ValueErrors, and name the field only
                raise ValueError(f"line {number}: {error}") from None
    if not keys:
        raise ValueError("it holds no key")
    return tuple(keys)


def _json_key(text: str) -> ApiKey:
    line = msgspec.json.decode(text, type=_Line)
    if (line.key is None) == (line.sha256 is None):
        raise ValueError("either key or sha256 must be given")
    key = plain_key(line.key) if line.key is not None else None
    digest = key.digest if key is not None else bytes.fromhex(line.sha256 or "")
    return ApiKey(digest, line.name or digest.hex()[:TENANT_CHARS], line.limits())


def checked(keys: Iterable[ApiKey]) -> tuple[ApiKey, ...]:
    """Each key once, in order. Raises ValueError when a key or a tenant is told in two ways."""
    by_digest: dict[bytes, ApiKey] = {}
    by_tenant: dict[str, ApiKey] = {}
    for key in keys:
        if by_digest.setdefault(key.digest, key) != key:
            raise ValueError(f"the key of {key.tenant} is there twice, with different names or limits")
        if by_tenant.setdefault(key.tenant, key).limits != key.limits:
            raise ValueError(f"the keys of {key.tenant} have different limits")
    return tuple(by_digest.values())

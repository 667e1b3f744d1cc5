"""Who may see and change what the scheduler goes by: whoever shows an admin key, once anybody has a key."""

import hmac
from pathlib import Path

from weir.core.api_key import MIN_KEY_CHARS, key_digest
from weir.core.errors import FieldViolation, InvalidRequest, PermissionDenied, Unauthenticated
from weir.scheduling.limits.core_limits import CoreLimits


class Operators:
    """Admin keys are those of the limits, and the one that this process was given in a file of its own.

    A stack without any keys, as on a laptop, asks for none. Once tenants have keys, an admin key is needed, so that no
    tenant can change its own limits.
    """

    def __init__(self, own_key: str = "") -> None:
        self._own_digests = (key_digest(own_key),) if own_key else ()
        self.num_refused = 0

    @classmethod
    def from_file(cls, path: Path) -> "Operators":
        """Raises InvalidRequest for a file that cannot be read or holds no key."""
        try:
            key = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise _bad_file(f"cannot be read: {error}") from error
        if len(key) < MIN_KEY_CHARS:
            raise _bad_file(f"{path}: a key of {len(key)} characters, must have at least {MIN_KEY_CHARS}")
        return cls(key)

    @property
    def has_own_key(self) -> bool:
        return bool(self._own_digests)

    def check(self, key: str | None, limits: CoreLimits) -> None:
        """Raises Unauthenticated or PermissionDenied for who may not."""
        if not (limits.has_tenant_keys or limits.admin_key_digests):
            return
        try:
            self._check_needed(key, limits)
        except (Unauthenticated, PermissionDenied):
            self.num_refused += 1
            raise

    def _check_needed(self, key: str | None, limits: CoreLimits) -> None:
        admins = (*self._own_digests, *map(bytes.fromhex, limits.admin_key_digests))
        if not admins:
            raise PermissionDenied(
                "tenants have API keys and no admin key is known: put admin_key_digests into the limits file "
                "(`weir limits key` makes one), or give the scheduler an admin_key_file"
            )
        if key is None:
            raise Unauthenticated(
                "an admin key is needed: give --admin-key or WEIR_ADMIN_KEY, or send Authorization: Bearer KEY"
            )
        digest = key_digest(key)
        if not any(hmac.compare_digest(digest, admin) for admin in admins):
            tenants = limits.tenants_by_name.values()
            if any(digest.hex() in tenant.api_key_digests for tenant in tenants):
                raise PermissionDenied("this is a tenant's key: limits and policy take one of admin_key_digests")
            raise Unauthenticated("the admin key is not known")


def _bad_file(description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation("admin_key_file", description)])

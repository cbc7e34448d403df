"""Who waits: a user, a user of a tenant, or a tenant, and their names in Redis.

`lua/lib/owners.lua` makes the same names. Names of users and tenants have no control characters.
"""

from dataclasses import dataclass

_TENANT = "\x02"  # before a tenant, and between it and its user
_POOL = "\x03"  # between an owner and a pool: a seat


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """A user, or a user of a tenant: ann of acme and ann of globex are two.

    With the user id "" and a tenant, it stands for all users of the tenant together.
    """

    user_id: str
    tenant: str | None = None

    @property
    def is_tenant(self) -> bool:
        """Whether it stands for a whole tenant."""
        return self.tenant is not None and not self.user_id

    @property
    def key(self) -> str:
        """The name in Redis."""
        if self.tenant is None:
            return self.user_id
        lead = f"{_TENANT}{self.tenant}"
        return f"{lead}{_TENANT}{self.user_id}" if self.user_id else lead

    def seat(self, pool: str | None = None) -> str:
        """The name in Redis of its place in a pool; None for the default pool."""
        return self.key if pool is None else f"{self.key}{_POOL}{pool}"

    @property
    def range(self) -> tuple[str, str]:
        """The range of its members in an index by seat, in all pools, for ZRANGEBYLEX."""
        key = self.key
        return (
            (f"[{key}{_TENANT}", f"({key}{_POOL}")
            if self.is_tenant
            else (f"[{key}\0", f"({key}\x04")
        )

    @classmethod
    def of_key(cls, key: str) -> "Owner":
        """Return the owner with a name in Redis."""
        if not key.startswith(_TENANT):
            return cls(key)
        tenant, _, user_id = key[1:].partition(_TENANT)
        return cls(user_id, tenant)

    @classmethod
    def whole(cls, tenant: str) -> "Owner":
        """Return a tenant as one of those who share the queue."""
        return cls("", tenant)

    def __str__(self) -> str:
        """What people read: `ann`, `ann of acme`, or `acme`."""
        if self.is_tenant:
            return str(self.tenant)
        return self.user_id if self.tenant is None else f"{self.user_id} of {self.tenant}"

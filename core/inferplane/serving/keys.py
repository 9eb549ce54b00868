"""Access keys: which clients may call, and under which tenant their cached prefixes are shared."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable


class Keys:
    """The keys that clients may send; without keys every client is admitted.

    A wrong key takes as long to check as a right one.

    Args:
        keys: the keys.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, headers: Iterable[tuple[bytes, bytes]], *, browser: bool = False) -> bool:
        """Return whether there is exactly one Authorization header and it holds one of the keys.

        Args:
            headers: of the request.
            browser: also accept the key as the password of HTTP Basic.
        """
        found = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = found[0].partition(b" ") if len(found) == 1 else (b"", b"", b"")
        if browser and scheme.lower() == b"basic":
            scheme, key = b"bearer", _basic_password(key)
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches) and scheme.lower() == b"bearer"

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the tenant of a request: one per key, so that no key can probe the cached prefixes of another."""
        if not self._digests:
            return ""
        return hashlib.sha256(b"\n".join(v for name, v in headers if name == b"authorization")).hexdigest()[:16]


def _basic_password(encoded: bytes) -> bytes:
    """Return the password of a Basic header: the text after its colon."""
    try:
        return base64.b64decode(encoded.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""

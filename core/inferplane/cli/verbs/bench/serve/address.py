"""Parses the URL of a server: its scheme, host, port and path prefix."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from inferplane.errors import UsageError

SCHEMES = {"http": 80, "https": 443, "grpc": 0, "grpcs": 0}
"""Scheme -> its port where the URL has none; 0: it has to have one."""
SUFFIXES = ("/chat/completions", "/completions")
"""Ends of a path that name an endpoint, which the command chooses itself."""
REMEDY = "pass for example --url http://localhost:8000"
PLAIN = "/%:@!$&'()*+,;=~-._"
"""Characters of a path that are sent as they are, beside letters and digits (RFC 3986, section 3.3)."""


@dataclass(frozen=True)
class ServerAddress:
    """Where a server listens.

    Args:
        scheme: one of `SCHEMES`.
        host: a name or an address, without brackets.
        port: of TCP.
        prefix: what its paths begin with: "" or "/some/path", without "/v1".
    """

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @property
    def is_grpc(self) -> bool:
        """Whether the scheme is gRPC's."""
        return self.scheme.startswith("grpc")

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection is made with TLS."""
        return self.scheme in ("https", "grpcs")

    @property
    def authority(self) -> str:
        """Host and port, as a `Host` header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == SCHEMES[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"


def parse_url(words: str) -> ServerAddress:
    """Parse `--url`. A URL without a scheme is HTTP's; a path may be a prefix, and may end with `/v1` or an endpoint.

    Letters beyond ASCII are sent as the standards say: those of a host in IDNA's form, those of a path percent-encoded.

    Raises:
        UsageError: it has another scheme, no host or one that no name system can hold, an impossible port, a blank, a
            user, a query or a fragment.
    """
    text = words.strip()
    if any(c.isspace() or not c.isprintable() for c in text):
        raise UsageError(f"--url {words!r} has a blank or a control character.", remedy="remove it, or write it as %20")
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = _encode_host(parts.hostname or ""), parts.port
    except ValueError as error:
        raise UsageError(f"--url {words!r}: {error}.", remedy=REMEDY) from error
    if parts.scheme not in SCHEMES:
        raise UsageError(f"--url {words!r} has the scheme {parts.scheme!r}.", there_is=", ".join(SCHEMES))
    if not host:
        raise UsageError(f"--url {words!r} names no host.", remedy=REMEDY)
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            f"--url {words!r} has a user, a query or a fragment.", remedy="leave it out; a key belongs into --api-key"
        )
    if port == 0:
        raise UsageError(f"--url {words!r} has the port 0.", there_is="ports from 1 to 65535")
    if not (port or SCHEMES[parts.scheme]):
        raise UsageError(f"--url {words!r} has no port.", remedy="add it, as in grpc://localhost:8001")
    prefix = quote(parts.path, safe=PLAIN).rstrip("/")
    for suffix in SUFFIXES:
        prefix = prefix.removesuffix(suffix)
    prefix = prefix.removesuffix("/v1").rstrip("/")
    if prefix and parts.scheme.startswith("grpc"):
        raise UsageError(f"--url {words!r} has a path, which gRPC does not.", remedy="leave it out")
    return ServerAddress(parts.scheme, host, port or SCHEMES[parts.scheme], prefix)


def _encode_host(host: str) -> str:
    return host if ":" in host else host.encode("idna").decode("ascii")

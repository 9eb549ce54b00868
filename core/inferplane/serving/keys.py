"""Access: which keys clients may send, what log and metrics call each, and by which names the server is addressed.

A key file has one key a line, alone or behind a name: `ci: 5f0c...`. A key without a name is called by its place, as
`key-2`. The file is read again on SIGHUP.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from inferplane.errors import UsageError
from inferplane.serving.settings import ServerSettings

ANY_HOST = "*"
"""In `allowed_hosts`: every name."""
MAX_KEYS = 1024
"""Each key has a row in the tables that the server's processes share (`shared_state/key_usage.py`)."""
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64}):\s+(\S.*)")


@dataclass(frozen=True)
class AccessKey:
    """A key that clients may send.

    Args:
        name: in log lines and metrics.
        digest: SHA-256 of what clients send.
        row: of its numbers in the tables of `KeyUsage`; no other name has it.
    """

    name: str
    digest: bytes
    row: int

    @property
    def tenant(self) -> str:
        """Cached prefixes are shared among requests of one tenant only: no key can probe what another has cached."""
        return hashlib.sha256(self.digest).hexdigest()[:16]


class Keys:
    """The keys that clients may send; without keys every client is admitted.

    A wrong key takes as long to check as a right one.

    Args:
        lines: the keys, each as `key` or `name: key`.
    """

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.all: tuple[AccessKey, ...] = ()
        self._rows: dict[str, int] = {}
        self.replace(lines)

    def __bool__(self) -> bool:
        return bool(self.all)

    def replace(self, lines: Iterable[str]) -> None:
        """Accept these keys instead of those of before. A name keeps its row, also while its key is not accepted.

        Raises:
            UsageError: two keys have one name, or there are too many; nothing changes.
        """
        rows, found = dict(self._rows), dict[str, AccessKey]()
        for place, line in enumerate(lines, 1):
            named = _NAMED.fullmatch(line)
            name, secret = named.groups() if named else (f"key-{place}", line)
            if name in found:
                raise UsageError(f"Two keys are named {name!r}.", remedy="give each key a name of its own")
            found[name] = AccessKey(name, hashlib.sha256(secret.encode()).digest(), rows.setdefault(name, len(rows)))
        if len(rows) > MAX_KEYS:
            raise UsageError(
                f"{len(rows)} keys since the server was started.",
                there_is=f"numbers for {MAX_KEYS}",
                remedy="use fewer keys, or start the server again",
            )
        self._rows, self.all = rows, tuple(found.values())

    def to_list(self) -> list[tuple[str, str, int]]:
        """The keys as JSON can hold them, for another process's `set`: digests, not what clients send."""
        return [(key.name, key.digest.hex(), key.row) for key in self.all]

    def set(self, found: Iterable[Sequence[str | int]]) -> None:
        """Accept the keys of another process's `to_list`."""
        self.all = tuple(AccessKey(str(name), bytes.fromhex(str(digest)), int(row)) for name, digest, row in found)

    def find(self, headers: Iterable[tuple[bytes, bytes]], *, browser: bool = False) -> AccessKey | None:
        """Return the key of a request that has exactly one Authorization header, which holds one of the keys.

        Args:
            headers: of the request.
            browser: also accept the key as the password of HTTP Basic.
        """
        if not self.all:
            return None
        sent = [value for name, value in headers if name == b"authorization"]
        scheme, _, secret = sent[0].partition(b" ") if len(sent) == 1 else (b"", b"", b"")
        if browser and scheme.lower() == b"basic":
            scheme, secret = b"bearer", _basic_password(secret)
        digest = hashlib.sha256(secret.strip()).digest()
        matches = [key for key in self.all if hmac.compare_digest(digest, key.digest)]
        return matches[0] if matches and scheme.lower() == b"bearer" else None


def _basic_password(encoded: bytes) -> bytes:
    """Return the password of a Basic header: the text after its colon."""
    try:
        return base64.b64decode(encoded.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def read_keys(settings: ServerSettings) -> list[str]:
    """Return the lines for `Keys` from the settings and from the key file.

    Raises:
        UsageError: the file cannot be read or holds no key: a server that was meant to need keys must not run without.
    """
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        try:
            lines = Path(settings.api_key_file).read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"api_key_file {settings.api_key_file} cannot be read: {error}.",
                remedy="name a text file with one key a line",
            ) from error
        found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not found:
            raise UsageError(f"api_key_file {settings.api_key_file} holds no key.", remedy="write one a line")
        keys += found
    return keys


# -- which names clients may address the server by
#
# A web page can let its own name point at 127.0.0.1 once it is loaded (DNS rebinding): the browser then takes a local
# server for the page's own, and lets it read the answers. Such requests carry the page's name as their Host.


def host_check(settings: ServerSettings, *, has_keys: bool) -> Callable[[str], bool] | None:
    """Return what tells whether a request with this Host is answered; None if every one is. A key stops web pages, too:
    without `allowed_hosts` only a server without keys on a loopback address looks at the name.

    Args:
        settings: the address and the allowed names.
        has_keys: whether requests need a key.
    """
    allowed = {_name(host) for host in settings.allowed_hosts}
    if ANY_HOST in allowed or not (allowed or (_is_local(settings.host) and not has_keys)):
        return None

    @lru_cache(64)
    def is_allowed(host: str) -> bool:
        name = _name(host)
        return not name or name in allowed or _is_local(name)  # browsers never leave it out

    return is_allowed


def _name(host: str) -> str:
    """Return the name or address of a Host, without port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name = host if host.count(":") > 1 else host.partition(":")[0]
    return name.removesuffix(".").lower()


def _is_local(name: str) -> bool:
    """Return whether a name means this machine, whatever name servers say."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")

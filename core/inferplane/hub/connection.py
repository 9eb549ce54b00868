"""Requests to a hub: redirects that carry the token no further, and waits for a busy server.

Through the HTTP client of huggingface_hub, so that a factory that the user has given it (for proxies, certificates)
counts here too.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urljoin, urlsplit

from inferplane.errors import DownloadError
from inferplane.hub.settings import HubSettings

MAX_REDIRECTS = 8
MAX_FAILURES = 4
"""Failures in a row, without a byte received in between, after which a download ends."""
MAX_ANSWER_BYTES = 64 * 2**20
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 10.0, 30.0
PART_OF_FILE = 206
BUSY = (429, 500, 502, 503, 504)
REDIRECTS = (301, 302, 303, 307, 308)
FIRST_PAUSE_S = 0.5


class HubConnection:
    """The way to one hub, for one download: it counts failures and waits.

    Args:
        settings: the hub.
        say: takes a sentence when a server makes the download wait.
    """

    def __init__(self, settings: HubSettings, say: Callable[[str], None]) -> None:
        from huggingface_hub import get_session

        self.settings, self.say = settings, say
        self._session = get_session
        self._waited = 0.0
        self._failures = 0
        self._token = settings.token()
        self.has_answered = False
        """Whether the hub, or a proxy before it, has sent an answer."""
        library = sys.modules[type(get_session()).__module__.partition(".")[0]]  # httpx, or what follows it
        self.interruptions: tuple[type[Exception], ...] = (library.TransportError, ConnectionError, TimeoutError)
        """Exceptions of a connection that failed; files raise none of them."""

    @property
    def has_token(self) -> bool:
        """Whether the user has a token."""
        return self._token is not None

    @contextlib.contextmanager
    def get(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[Any]:
        """Yield the response to a request, its body unread; its status is 2xx, or 4xx but 429.

        Raises:
            DownloadError: the server cannot be reached, stays busy beyond the limit, or redirects without end.
        """
        while True:
            with contextlib.ExitStack() as opened:
                try:
                    response = self._send(url, headers or {}, opened)
                except self.interruptions as error:
                    failure: Exception | None = error
                else:
                    self.has_answered = True
                    if response.status_code not in BUSY:
                        yield response
                        return
                    failure, status, seconds = None, response.status_code, _retry_after(response.headers)
            if failure is not None:
                self.pause_after(failure)
            else:
                self._pause_for_busy(status, seconds)

    def get_json(self, url: str, refuse: Callable[[Any], Exception]) -> Any:
        """The JSON value at an address.

        Args:
            url: the address.
            refuse: makes the error for a response that is no success.

        Raises:
            DownloadError: as `get`, or the answer is no JSON.
        """
        while True:
            with self.get(url) as response:
                try:
                    body = b""
                    for chunk in response.iter_bytes():
                        body += chunk
                        if len(body) > MAX_ANSWER_BYTES:
                            raise self.wrong_answer("more than is plausible")
                except self.interruptions as error:
                    failure = error
                else:
                    if response.status_code >= 300:
                        raise refuse(response)
                    try:
                        return json.loads(body)
                    except (ValueError, RecursionError) as error:
                        raise self.wrong_answer("no JSON") from error
            self.pause_after(failure)

    def get_bytes(self, url: str, first: int, count: int, refuse: Callable[[Any], Exception]) -> bytes:
        """Some bytes of a file: `count`, or all from the first one on if there are fewer.

        Args:
            url: its address.
            first: number of the first one. count: more than 0.
            refuse: makes the error for a response that is no success.

        Raises:
            DownloadError: as `get`.
        """
        while True:
            with self.get(url, {"range": f"bytes={first}-{first + count - 1}"}) as response:
                if response.status_code >= 300:
                    raise refuse(response)
                body, before = b"", 0 if response.status_code == PART_OF_FILE else first
                try:
                    for chunk in response.iter_raw():  # of a server without ranges no more than that is read
                        body += chunk[before:]
                        before = max(0, before - len(chunk))
                        if len(body) >= count:
                            break
                    return body[:count]
                except self.interruptions as error:
                    failure = error
            self.pause_after(failure)

    def wrong_answer(self, what: str) -> DownloadError:
        """The error for an answer that is not in the hub's protocol."""
        return DownloadError(
            f"{self.settings.endpoint} answers with {what}.",
            remedy="check HF_ENDPOINT, and proxies that answer in its place",
        )

    def note_bytes(self) -> None:
        """Forget earlier failures: the connection works."""
        self._failures = 0

    def pause_after(self, error: Exception) -> None:
        """Wait after a failed connection.

        Raises:
            DownloadError: it failed too often.
        """
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            host = urlsplit(self.settings.endpoint).netloc
            words = type(error).__name__ if not str(error) else str(error).splitlines()[0].partition("?")[0]
            raise DownloadError(
                f"{host} cannot be reached: {words}.",
                remedy="check the network, HTTPS_PROXY and HF_ENDPOINT (a mirror)",
            ) from None
        self._pause(min(FIRST_PAUSE_S * 2 ** (self._failures - 1), self.settings.max_wait_s))

    def _pause_for_busy(self, status: int, seconds: float | None) -> None:
        """Wait as a busy server requests; DownloadError if that exceeds the limit."""
        self._failures += 1
        given = seconds is not None
        wait = seconds if seconds is not None else FIRST_PAUSE_S * 2**self._failures
        left = self.settings.max_wait_s - self._waited
        if wait > left or (not given and self._failures > 2 * MAX_FAILURES):
            until = f", for another {wait:.0f} s by its own account" if given else ""
            raise DownloadError(
                f"{urlsplit(self.settings.endpoint).netloc} is busy (status {status}){until}.",
                remedy="try again later; with a token (`hf auth login`, HF_TOKEN) limits are higher",
            )
        if wait >= 1:
            self.say(f"the hub is busy (status {status}): waiting {wait:.0f} s")
        self._pause(wait)

    def _pause(self, seconds: float) -> None:
        self._waited += seconds
        time.sleep(seconds)

    def _send(self, url: str, headers: Mapping[str, str], opened: contextlib.ExitStack) -> Any:
        """Send a request, and follow redirects. Only the hub itself gets the token."""
        for _ in range(MAX_REDIRECTS):
            sent = {"accept-encoding": "identity", "user-agent": "inferplane", **headers}
            if self._token is not None and _origin(url) == _origin(self.settings.endpoint):
                sent["authorization"] = f"Bearer {self._token}"
            timeout = (CONNECT_TIMEOUT_S, READ_TIMEOUT_S, READ_TIMEOUT_S, CONNECT_TIMEOUT_S)
            stream = self._session().stream("GET", url, headers=sent, follow_redirects=False, timeout=timeout)
            response = opened.enter_context(stream)
            if response.status_code not in REDIRECTS or "location" not in response.headers:
                return response
            target = urljoin(url, response.headers["location"])
            schemes = urlsplit(url).scheme, urlsplit(target).scheme
            if schemes[1] not in ("http", "https") or schemes == ("https", "http"):
                raise self.wrong_answer(f"a redirect from {schemes[0]} to {schemes[1] or 'nothing'}")
            url = target
        raise self.wrong_answer("redirects without end")


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of `Retry-After`, which may be a date (RFC 9110, 10.2.3), to be compared with the server's own; None
    without a valid one."""
    value = headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value[:9])
    with contextlib.suppress(TypeError, ValueError):
        until, now = parsedate_to_datetime(value), parsedate_to_datetime(headers.get("date", ""))
        return max(0.0, (until - now).total_seconds())
    return None

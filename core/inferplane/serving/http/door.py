"""The door to the routes that generate: a request for which there is no place is refused before they are entered.

A burst is answered in the order of its arrival, and to accept a request costs many times what it costs to refuse one.
So refusals do not stand in line behind the work of those that were accepted: only a body that is there already is read,
and only to learn which dialect's error its sender understands.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from inferplane.serving import native
from inferplane.serving.errors import ApiError
from inferplane.serving.places import Reserved
from inferplane.serving.service import Service
from inferplane.serving.wire import parse


class Door:
    """See above.

    Args:
        service: has the places.
        paths: of the routes that generate.
    """

    def __init__(self, service: Service, paths: Collection[str]) -> None:
        self._service, self._paths = service, frozenset(paths)

    def leads(self, method: str, path: str) -> bool:
        """Whether a request generates."""
        return method == "POST" and path in self._paths

    def enter(self) -> Reserved:
        """A place for a request; ApiError 429 when there is none, 503 while there is no model that takes requests."""
        try:
            _ = self._service.served
            return Reserved(self._service.places)
        except ApiError as error:
            self._service.refused(error)
            raise

    @staticmethod
    def words(error: ApiError, body: bytes) -> dict[str, Any]:
        """An error in the dialect of a body."""
        try:
            data = parse(body)
        except ApiError:
            return error.body()
        if not native.is_native(data):
            return error.body()
        asked = data.get("req_id")
        return native.refusal(error, asked if isinstance(asked, str) else None)

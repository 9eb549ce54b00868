"""Messages as clients send them: what one will take as objects, counted before it is parsed, and the parser.

protobuf makes up to 44 bytes of each byte that is sent, an empty tensor being two, and keeps Python's lock meanwhile:
4 MB of such tensors took 185 MB and 0.6 s in which no other client was answered. A walk over the tags of a message
stops at a number of fields that no client needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from google.protobuf.message import DecodeError

from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.grpc import schema

MAX_FIELDS, MAX_NUMBER_BYTES = 4096, 2**20
"""Most fields of a message, over all its levels, and most bytes of its packed numbers; raw contents and texts are one
field, however long. A prompt of 131,072 token ids has 400 KB of packed numbers.
"""
FIELD_BYTES, PER_NUMBER_BYTE = 128, 16
"""Memory for a field, and for each byte of packed numbers. Measured with protobuf 6.33 on messages of 4 MB: empty
tensors 88 bytes each, parameters 94, packed booleans of a shape 15.
"""
_VARINT, _FIXED64, _BYTES, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_WIDTH = {_FIXED64: 8, _FIXED32: 4, _START_GROUP: 0, _END_GROUP: 0}
Kind = Mapping[int, Any] | bool
"""What bytes of a field hold: a message, by the numbers of its fields; True for packed numbers; False for a text."""


def parse_message(kind: Any, data: bytes) -> Any:
    """Return a message of the protobuf type `kind`.

    Raises:
        ApiError: 400, the data is none.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        raise _make_refusal(kind) from None


def count_memory(kind: Any, data: bytes) -> int:
    """Return the memory in bytes that a message takes at most, with the data itself.

    Args:
        kind: its protobuf type.
        data: as it was sent.

    Raises:
        ApiError: 400, the data is no such message, or has too many fields or numbers.
    """
    walk = _Walk(data)
    try:
        walk.count(0, len(data), _kinds(kind.DESCRIPTOR.full_name))
    except DecodeError:
        raise _make_refusal(kind) from None
    numbers = PER_NUMBER_BYTE * walk.number_bytes
    return 2 * len(data) + FIELD_BYTES * walk.fields + numbers


def _make_refusal(kind: Any) -> ApiError:
    return invalid(f"This message is no {kind.DESCRIPTOR.name}.")


@cache
def _kinds(name: str) -> dict[int, Kind]:
    """Return what a message's fields hold where bytes are sent for them, by number."""
    found: dict[int, Kind] = {}
    for field in schema.POOL.FindMessageTypeByName(name).fields:
        if field.message_type is not None:
            found[field.number] = _kinds(field.message_type.full_name)
        else:
            found[field.number] = field.cpp_type != field.CPPTYPE_STRING
    return found


class _Walk:
    """Counts the fields of a message, without making anything of them."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.fields = self.number_bytes = 0

    def count(self, at: int, end: int, kinds: Mapping[int, Kind]) -> None:
        """Count what is between two places of the data."""
        while at < end:
            self.fields += 1
            if self.fields > MAX_FIELDS:
                message = f"The message has more than {MAX_FIELDS} fields; send lists as packed or raw contents."
                raise invalid(message, None, "too_many")
            tag, at = self._varint(at, end)
            wire_type = tag & 7
            if wire_type == _VARINT:
                _, at = self._varint(at, end)
                continue
            if wire_type != _BYTES:
                if wire_type not in _WIDTH:
                    raise DecodeError
                at += _WIDTH[wire_type]
                continue
            length, at = self._varint(at, end)
            if at + length > end:
                raise DecodeError
            kind = kinds.get(tag >> 3, False)
            if isinstance(kind, Mapping):
                self.count(at, at + length, kind)
            elif kind:
                self._count_numbers(length)
            at += length
        if at > end:
            raise DecodeError

    def _count_numbers(self, num_bytes: int) -> None:
        self.number_bytes += num_bytes
        if self.number_bytes > MAX_NUMBER_BYTES:
            message = f"The message has more than {MAX_NUMBER_BYTES} bytes of numbers; send them as raw contents."
            raise invalid(message, None, "too_many")

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """Return a number of variable length, and the place behind it."""
        if at < end and (byte := self._data[at]) < 128:
            return byte, at + 1
        value = 0
        for i, byte in enumerate(self._data[at : min(at + 10, end)]):
            value |= (byte & 127) << 7 * i
            if byte < 128:
                return value, at + i + 1
        raise DecodeError

"""The messages between callers and an engine's process.

A frame is four bytes of length, little-endian, and one message in MessagePack. Every message is decoded to its type or
refused: nothing of it is ever executed.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from inferplane import errors
from inferplane.engine.clients.client import ModelInfo, Question, RequestId, Submission
from inferplane.engine.request.results import Delta
from inferplane.errors import EngineError, InferplaneError

MAX_FRAME_BYTES = 256 * 2**20
_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size


class Fault(msgspec.Struct, frozen=True):
    """An error by the name of its class, with its three parts."""

    kind: str
    what: str
    there_is: str = ""
    remedy: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """The message that carries an exception to another process; one that is not Inferplane's own becomes an
        EngineError.
        """
        if isinstance(error, InferplaneError):
            return cls(type(error).__name__, error.what, error.there_is, error.remedy)
        return cls(EngineError.__name__, f"{type(error).__name__}: {error}")

    def error(self) -> InferplaneError:
        """The exception that `of` was given, as an InferplaneError of the same class to raise; an unknown class becomes
        EngineError.
        """
        found = getattr(errors, self.kind, None)
        kind = found if isinstance(found, type) and issubclass(found, InferplaneError) else EngineError
        return kind(self.what, there_is=self.there_is, remedy=self.remedy)


# -- from callers


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """Load a model; the first message of the process that started the engine, and of no other."""

    model: Any
    options: dict[str, Any]
    address: str


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Queue a request; answered by `Reply` or `Refusal` with the same number."""

    number: int
    submission: Submission


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request."""

    request_id: RequestId


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Request the counters, the health or the plan; answered by `Reply` or `Refusal` with the same number."""

    number: int
    question: Question


class Close(msgspec.Struct, frozen=True, tag=True):
    """Drain, and end the process; ignored from callers that did not start it."""

    drain_s: float


# -- from the engine


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Bytes of weights loaded, of all."""

    done: int
    total: int


class Warned(msgspec.Struct, frozen=True, tag=True):
    """A warning while the model was loaded, or a line about a choice (`inferplane.errors.log_choice`)."""

    text: str
    is_choice: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded; also the first message to every later caller."""

    info: ModelInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The model could not be loaded; the process ends."""

    fault: Fault


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """A request, or an inspection, was refused."""

    number: int
    fault: Fault


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The requested counters, health or plan; None: a request is queued."""

    number: int
    value: dict[str, Any] | None


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """The pieces of one step for this caller."""

    pieces: list[tuple[RequestId, Delta]]


class Closed(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that closes."""


FromCaller = LoadModel | Submit | Abort | Inspect | Close
FromEngine = Progress | Warned | Ready | Failed | Refusal | Reply | Pieces | Closed

_encoder = msgspec.msgpack.Encoder()
read_caller = msgspec.msgpack.Decoder(FromCaller).decode
read_engine = msgspec.msgpack.Decoder(FromEngine).decode


def frame(message: FromCaller | FromEngine) -> bytes:
    """A message as bytes to send: four bytes of length, then the body in MessagePack.

    Raises:
        TypeError, OverflowError: it holds a value that MessagePack cannot represent.
        ValueError: its body is larger than `MAX_FRAME_BYTES`.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes; {MAX_FRAME_BYTES} are the most")
    return _LENGTH.pack(len(body)) + body


def number_of(body: bytes) -> int | None:
    """The `number` field of a body that is no valid `FromCaller`, so that `Refusal` can answer that message alone; None
    if the body cannot be decoded or has no integer there.
    """
    try:
        number = msgspec.msgpack.decode(body).get("number")
    except (ValueError, AttributeError):  # also for a string that is no UTF-8
        return None
    return number if type(number) is int else None


def body_bytes(header: bytes) -> int:
    """Length in bytes of the body that follows a header of `HEADER_BYTES` bytes.

    Raises:
        ValueError: the length is above `MAX_FRAME_BYTES`.
    """
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {length} bytes; {MAX_FRAME_BYTES} are the most")
    return int(length)

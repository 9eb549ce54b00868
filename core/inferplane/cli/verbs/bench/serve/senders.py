"""Sends one request over HTTP or gRPC, and says what kind of failure it was if there is no answer."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from inferplane.cli.verbs.bench.serve.address import ServerAddress
from inferplane.cli.verbs.bench.serve.dialects import AnswerReader, error_words, failure_of_status
from inferplane.cli.verbs.bench.serve.event_stream import StreamError
from inferplane.cli.verbs.bench.serve.http_client import HttpClient, NoAnswerError
from inferplane.cli.verbs.bench.serve.records import BROKEN, CONNECTION, OTHER, REFUSED, TIMEOUT
from inferplane.errors import UsageError, install_hint

if TYPE_CHECKING:
    import grpc

GRPC_MODEL = "model"
"""The name that Triton's clients give every model of this dialect."""
REFUSED_ERRORS = frozenset(
    (
        *("queue_full", "key_queue_full", "key_tokens_used_up", "busy", "loading", "shutting_down", "failed"),
        *("reader_failed", "engine_ended", "aborted"),
    )
)
"""Codes of errors over gRPC that HTTP answers with 429 or 503."""


class SendError(Exception):
    """There is no whole answer.

    Args:
        kind: of the failure.
        words: why.
        status: of HTTP; 0 without one.
    """

    def __init__(self, kind: str, words: str, status: int = 0) -> None:
        super().__init__(words)
        self.kind, self.words, self.status = kind, words, status


class Sender(Protocol):
    """A way to a server."""

    @property
    def resent(self) -> int:
        """Requests that were sent again on another connection, since the server closed a reused one unanswered."""

    async def send(self, body: bytes, reader: AnswerReader, limit_s: float) -> None:
        """Send a request and read its answer to the end; raise SendError if there is none within so many seconds."""

    async def disconnect(self) -> None:
        """Close all connections."""


class HttpSender:
    """Posts requests to one path.

    Args:
        client: of the server.
        path: behind the address's prefix.
    """

    def __init__(self, client: HttpClient, path: str) -> None:
        self.client, self._path = client, path

    @property
    def resent(self) -> int:
        return self.client.resent

    async def send(self, body: bytes, reader: AnswerReader, limit_s: float) -> None:
        try:
            answer = await self.client.send_json(self._path, body, reader.feed, limit_s)
        except TimeoutError:
            raise SendError(TIMEOUT, f"no end within {limit_s:g} s") from None
        except NoAnswerError as error:
            raise SendError(CONNECTION, str(error)) from error
        except StreamError as error:
            raise SendError(reader.failure or BROKEN, str(error)) from error
        if answer.status != 200:
            words = error_words(answer.body) if answer.body else ""
            if 300 <= answer.status < 400:
                words = f"redirects to {answer.headers.get('location', 'an unnamed place')}; pass that as --url"
            raise SendError(failure_of_status(answer.status), f"{answer.status}: {words}", answer.status)
        check_end(reader, answer.headers.get("content-type", ""))

    async def disconnect(self) -> None:
        self.client.disconnect()
        await asyncio.sleep(0)  # connections are closed in the loop's next pass


def check_end(reader: AnswerReader, content_type: str = "") -> None:
    """Raise SendError for a stream that has ended without saying so."""
    if reader.is_complete or reader.finish_reason:
        return
    if not reader.arrivals and "event-stream" not in content_type:
        words = f"the answer is no stream of events ({content_type or 'no content type'}, {reader.num_bytes} bytes)"
        raise SendError(OTHER, words)
    raise SendError(BROKEN, "the stream ended without a finish_reason and without [DONE]")


class GrpcSender:
    """Sends each request on a stream of `ModelStreamInfer`, in the source system's form: `IN` and `OUT` are JSON.

    Args:
        address: of the server.
        headers: metadata of every call.
        roots: certificates of authorities, PEM; None: the system's.
        model: name of the model.

    Raises:
        UsageError: grpc is not installed.
    """

    resent = 0  # what a channel tries again by itself is not seen

    def __init__(
        self, address: ServerAddress, headers: Sequence[tuple[str, str]], roots: bytes | None, model: str
    ) -> None:
        try:
            import grpc.aio

            from inferplane.serving.grpc import schema
        except ImportError as error:
            raise UsageError(f"--endpoint grpc needs grpcio ({error}).", remedy=install_hint("serving")) from error
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        if address.is_encrypted:
            credentials = grpc.ssl_channel_credentials(root_certificates=roots)
            self._channel = grpc.aio.secure_channel(address.authority, credentials, options=options)
        else:
            self._channel = grpc.aio.insecure_channel(address.authority, options=options)
        self._request, response = schema.method_types("ModelStreamInfer")
        self._call = self._channel.stream_stream(
            f"/{schema.SERVICE}/ModelStreamInfer",
            request_serializer=self._request.SerializeToString,
            response_deserializer=response.FromString,
        )
        self._metadata = [(name.lower(), value) for name, value in headers]
        self._model = model or GRPC_MODEL
        self._error: Any = grpc.aio.AioRpcError

    async def send(self, body: bytes, reader: AnswerReader, limit_s: float) -> None:
        request = self._request(model_name=self._model)
        request.inputs.add(name="IN", datatype="BYTES", shape=[1]).contents.bytes_contents.append(body)
        call = self._call(iter([request]), timeout=limit_s, metadata=self._metadata)
        try:
            async for response in call:
                self._read(response, reader)
        except self._error as error:
            raise _grpc_failure(error) from error
        except StreamError as error:
            raise SendError(reader.failure or BROKEN, str(error)) from error
        finally:
            call.cancel()
        check_end(reader, "event-stream")

    @staticmethod
    def _read(response: Any, reader: AnswerReader) -> None:
        now = time.perf_counter()
        answer = response.infer_response
        if response.error_message:
            code = answer.parameters["code"].string_param
            kind = REFUSED if code in REFUSED_ERRORS else TIMEOUT if code == "timeout" else OTHER
            raise SendError(kind, f"{response.error_message} ({code})" if code else response.error_message)
        for at, tensor in enumerate(answer.outputs):
            if tensor.name != "OUT":
                continue
            # Raw contents have the length of each text before it.
            found = (
                [raw[4:]] if (raw := answer.raw_output_contents[at : at + 1] and answer.raw_output_contents[at]) else []
            )
            for event in (*tensor.contents.bytes_contents, *found):
                reader.num_bytes += len(event)
                reader.read_event(event, now)

    async def disconnect(self) -> None:
        await self._channel.close()


def _grpc_failure(error: grpc.aio.AioRpcError) -> SendError:
    import grpc

    code, words = error.code(), " ".join((error.details() or "").split())
    kinds = {
        grpc.StatusCode.RESOURCE_EXHAUSTED: REFUSED,
        grpc.StatusCode.DEADLINE_EXCEEDED: TIMEOUT,
        grpc.StatusCode.UNAVAILABLE: CONNECTION,
    }
    metadata = {key: value for key, value in error.trailing_metadata() or ()}
    refused = metadata.get("inferplane-code") in REFUSED_ERRORS
    return SendError(REFUSED if refused else kinds.get(code, OTHER), f"{code.name}: {words}")


def make_tls(address: ServerAddress, *, insecure: bool) -> ssl.SSLContext | None:
    """Return what checks a server's certificate; None without TLS.

    Args:
        address: of the server.
        insecure: check nothing.
    """
    if not address.is_encrypted:
        return None
    return ssl._create_unverified_context() if insecure else ssl.create_default_context()

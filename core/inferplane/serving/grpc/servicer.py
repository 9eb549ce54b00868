"""The service: who may call it, what its methods do, and how a stream of requests becomes a stream of answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc

from inferplane import __version__
from inferplane.serving.errors import ApiError
from inferplane.serving.grpc import requests, schema, tensors
from inferplane.serving.http.gate import Keys
from inferplane.serving.rendering import GeneratedChoice
from inferplane.serving.service import Service
from inferplane.serving.tracing import carried

log = logging.getLogger("inferplane.serving.grpc")
VERSION = "1"
"""The one version of every model."""
TRITON_NAME = "model"
"""What the source system calls whatever model it serves."""
STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ALREADY_EXISTS,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""HTTP status -> gRPC's; any other is INTERNAL."""
MAX_CONCURRENT_REQUESTS = 256
"""Requests of one stream that may be at work; more wait to be read."""
INPUTS = {"IN": "BYTES", "text_input": "BYTES", "input_ids": "INT64", "max_tokens": "INT32", "stream": "BOOL"}
OUTPUTS = {"OUT": "BYTES", "text_output": "BYTES", "token_ids": "INT32", "finish_reason": "BYTES"}
GENERATE = frozenset(("ModelInfer", "ModelStreamInfer"))
"""Methods whose requests have spans."""
_FINAL, _EMPTY_FINAL = "triton_final_response", "triton_enable_empty_final_response"


class Servicer:
    """Methods of `inference.GRPCInferenceService`, by name.

    Args:
        service: does the work.
        keys: a key's callers share cached prefixes among each other alone, as over HTTP.
    """

    def __init__(self, service: Service, keys: Keys) -> None:
        self._service, self._keys = service, keys

    # -- about the server

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return _new("ServerLiveResponse", live=self._service.condition().live)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return _new("ServerReadyResponse", ready=self._service.condition().ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return _new("ServerMetadataResponse", name="inferplane", version=__version__, extensions=["statistics"])

    # -- about the model

    async def ModelReady(self, request: Any, context: Any) -> Any:
        ready = self._service.condition().ready
        if ready:
            self._name(request.name, request.version)
        return _new("ModelReadyResponse", ready=ready)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        name = self._name(request.name, request.version)
        response = _new("ModelMetadataResponse", name=name, versions=[VERSION], platform="inferplane")
        for field, named in (("inputs", INPUTS), ("outputs", OUTPUTS)):
            for tensor, datatype in named.items():
                length = -1 if tensor in ("input_ids", "token_ids") else 1
                getattr(response, field).add(name=tensor, datatype=datatype, shape=[length])
        return response

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        name = self._name(request.name, request.version)
        info = self._service.served.info
        response = _new("ModelConfigResponse")
        config = response.config
        config.name, config.platform, config.backend = name, "inferplane", "inferplane"
        config.model_transaction_policy.decoupled = True
        for field, named in ((config.input, INPUTS), (config.output, OUTPUTS)):
            for tensor, datatype in named.items():
                kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
                added = field.add(name=tensor, dims=[-1 if tensor in ("input_ids", "token_ids") else 1])
                added.data_type = schema.POOL.FindEnumTypeByName("inference.DataType").values_by_name[kind].number
                if field is config.input:
                    added.optional = True
        facts = {"device": info.device, "dtype": info.dtype, "max_model_len": info.max_model_len}
        for key, value in {**facts, "max_batch": info.max_batch}.items():
            config.parameters[key].string_value = str(value)
        return response

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        name = self._name(request.name, request.version)
        stats = await self._service.stats()
        ended = stats.get("request_success_total", {})
        good = sum(n for reason, n in ended.items() if reason in ("stop", "length"))
        response = _new("ModelStatisticsResponse")
        model = response.model_stats.add(name=name, version=VERSION)
        model.inference_count, model.execution_count = good, stats.get("steps_total", 0)
        kinds = model.inference_stats
        kinds.success.count, kinds.fail.count = good, sum(ended.values()) - good
        for field, histogram in (
            (kinds.success, "e2e_request_latency_seconds"),
            (kinds.queue, "request_queue_time_seconds"),
            (kinds.compute_infer, "step_time_seconds"),
        ):
            found = stats.get(histogram, {"sum": 0.0, "count": 0})
            field.ns = int(found["sum"] * 1e9)
            field.count = field.count or found["count"]
        return response

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        response = _new("RepositoryIndexResponse")
        condition = self._service.condition()
        if self._service.model is not None and (condition.ready or not request.ready):
            state = "READY" if condition.ready else "UNAVAILABLE"
            for name in self._service.model.names:
                response.models.add(name=name, version=VERSION, state=state, reason=condition.detail)
        return response

    def _name(self, asked: str, version: str) -> str:
        """The name to answer with, as `_checked`; a refusal counts."""
        with self._service.counted():
            return self._checked(asked, version)

    def _checked(self, asked: str, version: str) -> str:
        """The name to answer with; ApiError 404 for another model's, and for another version."""
        model = self._service.served
        if version not in ("", VERSION):
            raise ApiError(404, f"There is no version {version[:40]!r}; there is {VERSION}.", code="model_not_found")
        model.resolve_name(None if asked == TRITON_NAME else asked)
        return asked or model.names[0]

    # -- inference

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        caller = self._caller(context)
        wanted = await self._understood("ModelInfer", request, caller)
        async with self._service.admit(replace(wanted.ask, **caller)) as generation:
            choices = [GeneratedChoice() for _ in range(generation.choices)]
            async for piece in generation.pieces():
                choices[piece.choice].add(piece.delta)
            return _response(request, wanted.answer.whole(generation, choices))

    async def ModelStreamInfer(self, stream: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """Answers come as they are made, each with its request's id; a request's error ends that one alone.

        A client that leaves an answer unread for too long is cut off, as over HTTP: its requests keep their places.
        """
        answers: asyncio.Queue[Any] = asyncio.Queue(MAX_CONCURRENT_REQUESTS)
        reader = asyncio.create_task(self._read(stream, answers, self._caller(context)))
        loop, call, unread = asyncio.get_running_loop(), asyncio.current_task(), None
        assert call is not None

        def cut_off() -> None:
            reader.cancel()
            call.cancel()

        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, ApiError):
                    await context.abort(STATUS[answer.status], answer.message)
                unread = loop.call_later(self._service.settings.write_timeout_s, cut_off)
                yield answer
                unread.cancel()
        finally:
            if unread is not None:
                unread.cancel()
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def _understood(self, method: str, request: Any, caller: Mapping[str, Any]) -> requests.InferCall:
        """What is asked for; a refusal counts, and has a span."""
        began = time.monotonic()
        try:
            self._checked(request.model_name, request.model_version)
            return await requests.wanted(request, self._service)
        except ApiError as error:
            refused(self._service, method, error, caller["trace"], time.monotonic() - began)
            raise

    def _caller(self, context: Any) -> dict[str, Any]:
        """What an `GenerateCall` tells of who asks."""
        found = headers(context.invocation_metadata())
        return {"tenant": self._keys.tenant(found), "trace": carried(found)}

    async def _read(self, stream: AsyncIterator[Any], answers: asyncio.Queue[Any], caller: dict[str, Any]) -> None:
        tasks: set[asyncio.Task[None]] = set()
        try:
            async for request in stream:
                while len(tasks) >= MAX_CONCURRENT_REQUESTS:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                task = asyncio.create_task(self._answer(request, answers, caller))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            while tasks:
                await asyncio.wait(tasks)
            await answers.put(None)
        except Exception as error:  # a message that is none of the protocol's: reading goes no further
            log.info("a stream of requests ended: %s: %s", type(error).__name__, error)
            await answers.put(ApiError(400, "A message of this stream is no ModelInferRequest.", code="invalid_value"))
        finally:
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, request: Any, answers: asyncio.Queue[Any], caller: dict[str, Any]) -> None:
        """One request of a stream, from its admission to its last answer."""
        try:
            async for response in self._pieces(request, caller):
                await answers.put(_new("ModelStreamInferResponse", infer_response=response))
        except ApiError as error:
            await answers.put(_failure(request, error))
        except Exception:
            log.exception("a request failed inside the server")
            failure = ApiError(500, "The request failed inside the server.", code="internal_error")
            await answers.put(_failure(request, failure))

    async def _pieces(self, request: Any, caller: dict[str, Any]) -> AsyncIterator[Any]:
        wanted = await self._understood("ModelStreamInfer", request, caller)
        empty_final = tensors.parameters(request).get(_EMPTY_FINAL) is True
        async with self._service.admit(replace(wanted.ask, **caller)) as generation:
            choices = [GeneratedChoice() for _ in range(generation.choices)]
            left = generation.choices
            async for piece in generation.pieces():
                left -= piece.delta.finish_reason is not None
                if not wanted.stream:
                    choices[piece.choice].add(piece.delta)
                    found = None if left else wanted.answer.whole(generation, choices)
                else:
                    found = wanted.answer.outputs(generation, piece)
                if found is not None:
                    yield _response(request, found, final=not left and not empty_final)
            if empty_final:
                yield _response(request, {}, final=True)


def refused(service: Service, method: str, error: ApiError, trace: Mapping[str, str], took_s: float) -> None:
    """Count a call, or a stream's request, that was refused before it was admitted, and make its span.

    Args:
        service: counts.
        method: without the service's name.
        error: what is answered.
        trace: headers that say under which span it belongs.
        took_s: from its arrival to now.
    """
    service.refused(error)
    if service.tracer is not None and method in GENERATE:
        name, status = f"{schema.SERVICE}/{method}", STATUS.get(error.status, grpc.StatusCode.INTERNAL).name
        told = {"rpc.system.name": "grpc", "rpc.method": name, "rpc.response.status_code": status}
        service.tracer.refused(name, told, trace, error.code, took_s)


def headers(metadata: Any) -> list[tuple[bytes, bytes]]:
    """A call's metadata as HTTP's headers."""
    return [(k.encode(), v if isinstance(v, bytes) else v.encode()) for k, v in metadata or ()]


def _new(kind: str, /, **fields: Any) -> Any:
    return schema.message(kind)(**fields)


def _response(request: Any, outputs: dict[str, Any], *, final: bool = True) -> Any:
    """A `ModelInferResponse`, with the outputs that were asked for."""
    response = _new("ModelInferResponse", model_name=request.model_name, model_version=VERSION, id=request.id)
    wanted = [o.name for o in request.outputs] or list(outputs)
    for name in wanted:
        if name in outputs:
            tensors.write(response, name, *outputs[name])
    response.parameters[_FINAL].bool_param = final
    return response


def _failure(request: Any, error: ApiError) -> Any:
    """An error on a stream: the request's id is with it, and the stream goes on."""
    failed = _new("ModelInferResponse", model_name=request.model_name, model_version=VERSION, id=request.id)
    failed.parameters[_FINAL].bool_param = True
    failed.parameters["code"].string_param = error.code
    if error.param is not None:
        failed.parameters["param"].string_param = error.param
    return _new("ModelStreamInferResponse", error_message=error.message, infer_response=failed)


Method = Callable[[Any, Any], Awaitable[Any]]


def guarded(method: Method) -> Method:
    """A method whose ApiErrors become gRPC's statuses."""

    async def call(request: Any, context: Any) -> Any:
        try:
            return await method(request, context)
        except ApiError as error:
            trailing = [("inferplane-code", error.code)]
            if error.retry_after_s is not None:
                trailing.append(("retry-after", str(error.retry_after_s)))
            context.set_trailing_metadata(trailing)
            await context.abort(STATUS.get(error.status, grpc.StatusCode.INTERNAL), error.message)
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            log.exception("a request failed inside the server")
            await context.abort(grpc.StatusCode.INTERNAL, "The request failed inside the server.")

    return call

"""The methods of the inference service, and how a stream of requests becomes a stream of answers."""

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
from inferplane.serving.bodies import HeldMemory
from inferplane.serving.errors import ApiError, internal
from inferplane.serving.grpc import schema, tensors
from inferplane.serving.grpc.messages import count_memory, parse_message
from inferplane.serving.keys import Keys
from inferplane.serving.kserve import requests
from inferplane.serving.kserve.names import EXTENSIONS, INPUTS, OUTPUTS, VERSION, length_of, resolve_name
from inferplane.serving.rendering import GeneratedChoice, gather_choices
from inferplane.serving.service import Service
from inferplane.serving.tracing import trace_headers

log = logging.getLogger("inferplane.serving.grpc")
STATUS = {
    **dict.fromkeys((400, 413), grpc.StatusCode.INVALID_ARGUMENT),
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    **dict.fromkeys((408, 504), grpc.StatusCode.DEADLINE_EXCEEDED),
    409: grpc.StatusCode.ALREADY_EXISTS,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
"""HTTP status -> gRPC's; all others are INTERNAL."""
STATUS_BY_CODE = {"busy": grpc.StatusCode.RESOURCE_EXHAUSTED}
"""Code of an error -> gRPC's status, where the HTTP status says less."""
MAX_CONCURRENT_REQUESTS = 256
"""Most requests of one stream that run at a time; further ones are not read yet."""
GENERATE = frozenset(("ModelInfer", "ModelStreamInfer"))
"""Methods whose requests have spans."""
_FINAL, _EMPTY_FINAL = "triton_final_response", "triton_enable_empty_final_response"


class Servicer:
    """Methods of `inference.GRPCInferenceService`, by name.

    Args:
        service: runs the requests.
        keys: callers share cached prefixes only with callers of the same key, as over HTTP.
    """

    def __init__(self, service: Service, keys: Keys) -> None:
        self._service, self._keys = service, keys

    # -- about the server

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return _new("ServerLiveResponse", live=self._service.condition().live)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return _new("ServerReadyResponse", ready=self._service.condition().ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return _new("ServerMetadataResponse", name="inferplane", version=__version__, extensions=EXTENSIONS["grpc"])

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
                getattr(response, field).add(name=tensor, datatype=datatype, shape=[length_of(tensor)])
        return response

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        name = self._name(request.name, request.version)
        info = self._service.ready_model.info
        response = _new("ModelConfigResponse")
        config = response.config
        config.name, config.platform, config.backend = name, "inferplane", "inferplane"
        config.model_transaction_policy.decoupled = True
        for field, named in ((config.input, INPUTS), (config.output, OUTPUTS)):
            for tensor, datatype in named.items():
                kind = "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
                added = field.add(name=tensor, dims=[length_of(tensor)])
                added.data_type = schema.POOL.FindEnumTypeByName("inference.DataType").values_by_name[kind].number
                if field is config.input:
                    added.optional = True
        facts = {"device": info.device, "dtype": info.dtype, "max_model_len": info.max_model_len}
        for key, value in {**facts, "max_batch": info.max_num_seqs}.items():
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

    def _name(self, name: str, version: str) -> str:
        """As `resolve_name`; a refusal counts."""
        with self._service.count_refusals():
            return resolve_name(self._service, name, version)

    # -- inference

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        caller = self._caller(context)
        with self._service.body_memory.hold() as held:
            infer = await self._parse("ModelInfer", request, caller, held)
            async with self._service.admit(replace(infer.call, **caller)) as generation:
                return _response(request, infer.rendering.full_response(generation, await gather_choices(generation)))

    async def ModelStreamInfer(self, stream: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Yield answers as they are generated, each with its request's id. An error ends only its own request, unless
        it is in what makes a message.

        If a client leaves an answer unread for too long, its call is cancelled, as over HTTP: its requests hold slots.
        """
        answers: asyncio.Queue[Any] = asyncio.Queue(MAX_CONCURRENT_REQUESTS)
        reader = asyncio.create_task(self._read(stream, answers, self._caller(context)))
        loop, call, unread = asyncio.get_running_loop(), asyncio.current_task(), None
        assert call is not None

        def cancel() -> None:
            reader.cancel()
            call.cancel()

        try:
            while (answer := await answers.get()) is not None:
                if isinstance(answer, ApiError):
                    await context.abort(grpc_status(answer), answer.message)
                unread = loop.call_later(self._service.settings.write_timeout_s, cancel)
                yield answer
                unread.cancel()
        finally:
            if unread is not None:
                unread.cancel()
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def _parse(
        self, method: str, request: Any, caller: Mapping[str, Any], held: HeldMemory
    ) -> requests.InferCall:
        """Parse a request; a refusal counts and has a span."""
        started = time.monotonic()
        try:
            resolve_name(self._service, request.model_name, request.model_version)
            given = tensors.read(request, requests.longest_inputs(self._service))
            parameters = tensors.parameters(request)
            return await requests.parse_infer_request(given, parameters, request.id, self._service, held)
        except ApiError as error:
            record_refusal(self._service, method, error, caller["trace"], time.monotonic() - started)
            raise

    def _caller(self, context: Any) -> dict[str, Any]:
        """Return the fields of a `GenerateCall` that depend on the caller."""
        found = metadata_headers(context.invocation_metadata())
        return {"key": self._keys.find(found), "trace": trace_headers(found)}

    async def _read(self, stream: AsyncIterator[bytes], answers: asyncio.Queue[Any], caller: dict[str, Any]) -> None:
        tasks: set[asyncio.Task[None]] = set()
        kind = schema.message("ModelInferRequest")
        try:
            async for data in stream:
                while len(tasks) >= MAX_CONCURRENT_REQUESTS:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                held = self._service.body_memory.hold()
                num_bytes = count_memory(kind, data)
                try:
                    held.add(num_bytes)
                except ApiError as error:  # there is no memory for this request, but maybe for the next one
                    self._service.count_refusal(error)
                    await answers.put(_failure(parse_message(schema.message("ModelInferRequestHead"), data), error))
                    continue
                try:
                    request = parse_message(kind, data)
                except ApiError:
                    held.release()
                    raise
                task = asyncio.create_task(self._answer(request, answers, caller, held))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                task.add_done_callback(held.release)  # also if it never began
            while tasks:
                await asyncio.wait(tasks)
            await answers.put(None)
        except ApiError as error:  # not a message of the protocol: reading stops
            self._service.count_refusal(error)
            await answers.put(error)
        except Exception as error:
            log.info("a stream of requests ended: %s: %s", type(error).__name__, error)
            await answers.put(ApiError(400, "This stream of requests cannot be read.", code="invalid_value"))
        finally:
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(
        self, request: Any, answers: asyncio.Queue[Any], caller: dict[str, Any], held: HeldMemory
    ) -> None:
        """Run one request of a stream, from its admission to its last answer."""
        try:
            async for response in self._pieces(request, caller, held):
                await answers.put(_new("ModelStreamInferResponse", infer_response=response))
        except ApiError as error:
            await answers.put(_failure(request, error))
        except Exception:
            log.exception("a request failed inside the server")
            await answers.put(_failure(request, internal()))

    async def _pieces(self, request: Any, caller: dict[str, Any], held: HeldMemory) -> AsyncIterator[Any]:
        infer = await self._parse("ModelStreamInfer", request, caller, held)
        empty_final = tensors.parameters(request).get(_EMPTY_FINAL) is True
        async with self._service.admit(replace(infer.call, **caller)) as generation:
            choices = [GeneratedChoice() for _ in range(generation.num_choices)]
            unfinished = generation.num_choices
            async for piece in generation.pieces():
                unfinished -= piece.delta.finish_reason is not None
                if not infer.stream:
                    choices[piece.choice].add(piece.delta)
                    found = None if unfinished else infer.rendering.full_response(generation, choices)
                else:
                    found = infer.rendering.outputs(generation, piece)
                if found is not None:
                    yield _response(request, found, final=not unfinished and not empty_final)
            if empty_final:
                yield _response(request, {}, final=True)


def grpc_status(error: ApiError) -> grpc.StatusCode:
    """Return the status of gRPC for an error."""
    return STATUS_BY_CODE.get(error.code) or STATUS.get(error.status, grpc.StatusCode.INTERNAL)


def record_refusal(service: Service, method: str, error: ApiError, trace: Mapping[str, str], took_s: float) -> None:
    """Count a call, or a request of a stream, that was refused before admission, and make its span.

    Args:
        service: counts it.
        method: the method's name without the service's.
        error: the answer.
        trace: headers that name the span's parent.
        took_s: seconds since its arrival.
    """
    service.count_refusal(error)
    if service.tracer is not None and method in GENERATE:
        name, status = f"{schema.SERVICE}/{method}", grpc_status(error).name
        attributes = {"rpc.system.name": "grpc", "rpc.method": name, "rpc.response.status_code": status}
        service.tracer.trace_refusal(name, attributes, trace, error.code, took_s)


def metadata_headers(metadata: Any) -> list[tuple[bytes, bytes]]:
    """Return a call's metadata in the form of HTTP headers."""
    return [(k.encode(), v if isinstance(v, bytes) else v.encode()) for k, v in metadata or ()]


def _new(kind: str, /, **fields: Any) -> Any:
    return schema.message(kind)(**fields)


def _response(request: Any, outputs: dict[str, Any], *, final: bool = True) -> Any:
    """Return a `ModelInferResponse` with the requested outputs."""
    response = _new("ModelInferResponse", model_name=request.model_name, model_version=VERSION, id=request.id)
    requested = [o.name for o in request.outputs] or list(outputs)
    for name in requested:
        if name in outputs:
            tensors.write(response, name, *outputs[name])
    response.parameters[_FINAL].bool_param = final
    return response


def _failure(request: Any, error: ApiError) -> Any:
    """Return an error on a stream, with the request's id; the stream goes on."""
    failed = _new("ModelInferResponse", model_name=request.model_name, model_version=VERSION, id=request.id)
    failed.parameters[_FINAL].bool_param = True
    failed.parameters["code"].string_param = error.code
    if error.param is not None:
        failed.parameters["param"].string_param = error.param
    return _new("ModelStreamInferResponse", error_message=error.message, infer_response=failed)


Method = Callable[[Any, Any], Awaitable[Any]]


def with_statuses(method: Method, kind: Any, service: Service) -> Method:
    """Return a method that takes its request as it was sent, and whose ApiErrors become gRPC statuses.

    Args:
        method: takes a message, and the call's context.
        kind: the message's type.
        service: has memory for messages.
    """

    async def call(data: bytes, context: Any) -> Any:
        try:
            with service.body_memory.hold() as held:
                with service.count_refusals():
                    held.add(count_memory(kind, data))
                    request = parse_message(kind, data)
                return await method(request, context)
        except ApiError as error:
            trailing = [("inferplane-code", error.code)]
            if error.retry_after_s is not None:
                trailing.append(("retry-after", str(error.retry_after_s)))
            context.set_trailing_metadata(trailing)
            await context.abort(grpc_status(error), error.message)
        except Exception as error:
            if isinstance(error, grpc.aio.AbortError):
                raise
            log.exception("a request failed inside the server")
            await context.abort(grpc.StatusCode.INTERNAL, internal().message)

    return call

"""KServe's inference protocol, version 2, over HTTP: the server, the model, and inference, all at once.

A request is JSON; with the extension for binary tensors, the contents of tensors follow it, and the header
`Inference-Header-Content-Length` says where the JSON ends. Answers are alike. Streams are gRPC's.

Source: https://github.com/kserve/open-inference-protocol, specification/protocol/inference_rest.md;
https://github.com/triton-inference-server/server, docs/protocol/extension_binary_data.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from inferplane import __version__
from inferplane.serving.admission import Deadline
from inferplane.serving.errors import ApiError, invalid
from inferplane.serving.generation import Generation
from inferplane.serving.http.responses import GenerateResponse
from inferplane.serving.http.scope import Scope, context_of, find_held
from inferplane.serving.kserve import names, requests, tensors
from inferplane.serving.kserve.tensors import BYTES, DTYPES, GivenTensor
from inferplane.serving.rendering import GeneratedChoice, Rendering, encode_json
from inferplane.serving.request_fields import Refused
from inferplane.serving.service import Service
from inferplane.serving.wire import MAX_TOKENS, AtMost, JsonObject, RequestBody, RequestObject, parse, validate

BINARY = "binary_data_output"
"""The parameter of a request that asks for all outputs in binary form."""
_NO_SHARED_MEMORY = dict.fromkeys(
    ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"), Refused("binary data")
)


class InputParameters(RequestObject):
    """Where the contents of an input are."""

    refused: ClassVar[Mapping[str, Refused]] = _NO_SHARED_MEMORY
    binary_data_size: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None


class OutputParameters(RequestObject):
    """The form of an output."""

    refused: ClassVar[Mapping[str, Refused]] = {**_NO_SHARED_MEMORY, "classification": Refused(neutral=(0,))}
    binary_data: bool | None = None


class InferInput(RequestObject):
    """An input: its elements are in `data`, nested or not, or behind the JSON."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    shape: Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKENS)]], AtMost(tensors.MAX_DIMENSIONS)]
    datatype: Annotated[str, Field(min_length=1, max_length=40)]
    parameters: InputParameters | None = None
    data: list[Any] | None = None


class InferRequestedOutput(RequestObject):
    """An output that is requested."""

    name: Annotated[str, Field(min_length=1, max_length=100)]
    parameters: OutputParameters | None = None


class InferRequest(RequestBody):
    """A text or token ids to continue, and parameters, as tensors."""

    id: Annotated[str, Field(max_length=128)] | None = None
    inputs: Annotated[list[InferInput], Field(min_length=1), AtMost(tensors.MAX_ENTRIES)]
    outputs: Annotated[list[InferRequestedOutput], AtMost(tensors.MAX_ENTRIES)] | None = None
    parameters: Annotated[dict[str, bool | int | float | str], AtMost(tensors.MAX_ENTRIES)] | None = None


class InferOutput(JsonObject):
    """An output: its elements are in `data`, or behind the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] | None = None
    data: list[Any] | None = None


class InferResponse(JsonObject):
    """The answer to a request for inference."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[InferOutput]


class InferError(JsonObject):
    """KServe's error, with the code and the field as in OpenAI's."""

    error: str
    code: str
    param: str | None


class ServerMetadata(JsonObject):
    """The server."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(JsonObject):
    """A tensor that a model takes or returns."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(JsonObject):
    """The model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(JsonObject):
    """Whether the model answers."""

    name: str
    ready: bool


def routes(service: Service) -> APIRouter:
    """Return the routes. Those with a version come first, since a model's name may contain slashes; the description has
    those without.
    """
    router = APIRouter()

    @router.get("/v2")
    async def server() -> Response:
        facts = ServerMetadata(name="inferplane", version=__version__, extensions=list(names.EXTENSIONS["http"]))
        return JSONResponse(facts.model_dump())

    @router.post("/v2/models/{model:path}/versions/{version}/infer", include_in_schema=False)
    async def infer_version(request: Request, model: str, version: str) -> Response:
        return await _infer(service, request.scope, await request.body(), model, version)

    @router.post("/v2/models/{model:path}/infer")
    async def infer(request: Request, model: str) -> Response:
        return await _infer(service, request.scope, await request.body(), model, "")

    @router.get("/v2/models/{model:path}/versions/{version}/ready", include_in_schema=False)
    async def ready_version(model: str, version: str) -> Response:
        return _ready(service, model, version)

    @router.get("/v2/models/{model:path}/ready")
    async def ready(model: str) -> Response:
        return _ready(service, model, "")

    @router.get("/v2/models/{model:path}/versions/{version}", include_in_schema=False)
    async def metadata_version(model: str, version: str) -> Response:
        return _metadata(service, model, version)

    @router.get("/v2/models/{model:path}")
    async def metadata(model: str) -> Response:
        return _metadata(service, model, "")

    return router


def _ready(service: Service, model: str, version: str) -> Response:
    name = names.resolve_name(service, model, version)
    is_ready = service.condition().ready
    return JSONResponse(ModelReady(name=name, ready=is_ready).model_dump(), 200 if is_ready else 503)


def _metadata(service: Service, model: str, version: str) -> Response:
    if names.is_infer_path(names.MODELS + model):  # a name may have slashes, so that this route gets that path too
        raise HTTPException(405, headers={"allow": "POST"})
    name = names.resolve_name(service, model, version)
    described = [
        [TensorMetadata(name=t, datatype=kind, shape=[names.length_of(t)]) for t, kind in named.items()]
        for named in (names.INPUTS, names.OUTPUTS)
    ]
    found = ModelMetadata(
        name=name, versions=[names.VERSION], platform="inferplane", inputs=described[0], outputs=described[1]
    )
    return JSONResponse(found.model_dump())


async def _infer(service: Service, scope: Scope, body: bytes, model: str, version: str) -> Response:
    context = context_of(scope)
    deadline = context.deadline = Deadline(service.settings.request_timeout_s)
    name = names.resolve_name(service, model, version)
    length = names.find_json_length(scope["headers"], len(body))
    head, tail = body[:length], body[length:]
    data = await deadline.enforce(service.read(len(head), parse, head))
    request = await deadline.enforce(service.read(len(head), validate, InferRequest, data))
    parameters = dict(request.parameters or {})
    is_binary = parameters.pop(BINARY, False) is True
    requested = {output.name: output.parameters for output in request.outputs or ()}
    if unknown := next((one for one in requested if one not in names.OUTPUTS), None):
        raise invalid(f"There is no output {unknown!r}. There is: {', '.join(names.OUTPUTS)}.", "outputs")
    longest = requests.longest_inputs(service)
    given = await deadline.enforce(service.read(len(body), _read_inputs, request.inputs, tail, longest))
    parsing = requests.parse_infer_request(given, parameters, request.id or "", service, find_held(scope))
    infer = await deadline.enforce(parsing)
    if infer.demands_stream:  # as Triton refuses models that answer in pieces at this path
        raise invalid(
            "stream = true: an answer here is whole. Leave it out, or stream by gRPC (ModelStreamInfer) or at "
            "/v1/chat/completions.",
            "stream",
        )
    deadline.shorten(infer.call.timeout_s)
    binary = {
        one: is_binary if form is None or form.binary_data is None else form.binary_data
        for one, form in requested.items()
    }
    rendering = InferRendering(infer.rendering, name, request.id, binary, is_binary)
    return GenerateResponse(service, infer.call, rendering, stream=False, ignored=service.count_ignored(request))


def _read_inputs(inputs: Sequence[InferInput], tail: bytes, longest: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return inputs by name.

    Args:
        inputs: of the request.
        tail: what follows the JSON: contents of tensors, in their order.
        longest: as of `tensors.read`.
    """
    given, at = [], 0
    for tensor in inputs:
        size = tensor.parameters.binary_data_size if tensor.parameters is not None else None
        if (size is None) == (tensor.data is None):
            raise invalid(f"{tensor.name} has data or binary_data_size, one of them.", tensor.name)
        if size is None:
            flat = _flatten(tensor, longest.get(tensor.name, 1))
            given.append(GivenTensor(tensor.name, tensor.datatype, tensor.shape, _convert(tensor, flat)))
            continue
        if at + size > len(tail):
            raise invalid(f"{tensor.name}: {size} bytes with {len(tail) - at} behind those before.", tensor.name)
        given.append(GivenTensor(tensor.name, tensor.datatype, tensor.shape, raw=tail[at : at + size]))
        at += size
    if at != len(tail):
        raise invalid(f"{len(tail)} bytes follow the JSON; the inputs have {at}.", "inputs")
    return tensors.read(given, longest)


def _flatten(tensor: InferInput, most: int) -> list[Any]:
    """Return the elements of nested lists in their order: at most one more than so many."""
    found: list[Any] = []
    waiting = [iter(tensor.data or ())]
    while waiting and len(found) <= most:
        if len(waiting) > tensors.MAX_DIMENSIONS:
            message = f"{tensor.name} has lists in more than {tensors.MAX_DIMENSIONS} others."
            raise invalid(message, tensor.name)
        element = next(waiting[-1], waiting)
        if element is waiting:
            waiting.pop()
        elif isinstance(element, list):
            waiting.append(iter(element))
        else:
            found.append(element)
    return found


def _convert(tensor: InferInput, values: list[Any]) -> list[Any]:
    """Return elements as the datatype has them; raise ApiError 400 for one that it cannot hold."""
    kind = DTYPES.get(tensor.datatype)
    if tensor.datatype == BYTES:
        holds: Any = lambda v: isinstance(v, str)  # noqa: E731
    elif kind is np.bool_:
        holds = lambda v: isinstance(v, bool)  # noqa: E731
    elif kind is not None and issubclass(kind, np.integer):
        low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
        holds = lambda v: isinstance(v, int) and not isinstance(v, bool) and low <= v <= high  # noqa: E731
    else:  # of floats; another datatype is refused where tensors are read
        holds = lambda v: isinstance(v, (int, float)) and not isinstance(v, bool)  # noqa: E731
    if wrong := [value for value in values if not holds(value)]:
        raise invalid(f"{tensor.name}: {str(wrong[0])[:40]!r} is no {tensor.datatype}.", tensor.name)
    return [v.encode("utf-8", "replace") for v in values] if tensor.datatype == BYTES else values


class InferRendering(Rendering):
    """The answer to one request for inference.

    Args:
        rendering: makes the outputs.
        name: the model's name for the client.
        request_id: the client's id; None: there is none.
        binary: outputs that are requested -> whether in binary form; empty: all are.
        is_binary: whether outputs are in binary form that are not among them.
    """

    def __init__(
        self,
        rendering: requests.TensorRendering,
        name: str,
        request_id: str | None,
        binary: Mapping[str, bool],
        is_binary: bool,
    ) -> None:
        self._rendering, self._binary, self._is_binary = rendering, binary, is_binary
        self._head: dict[str, Any] = {"model_name": name, "model_version": names.VERSION}
        self._head.update({} if request_id is None else {"id": request_id})

    def encode_answer(self, generation: Generation, choices: Sequence[GeneratedChoice]) -> tuple[bytes, dict[str, str]]:
        found = self._rendering.full_response(generation, choices)
        requested = self._binary or dict.fromkeys(found, self._is_binary)
        outputs, contents = [], []
        for name, is_binary in requested.items():
            if name not in found:
                continue
            datatype, values = found[name]
            output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": [len(values)]}
            if is_binary:
                contents.append(tensors.encode(datatype, values))
                output["parameters"] = {"binary_data_size": len(contents[-1])}
            else:
                output["data"] = [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in values]
            outputs.append(output)
        head = encode_json({**self._head, "outputs": outputs})
        if not contents:
            return head, {"content-type": "application/json"}
        headers = {"content-type": "application/octet-stream", names.JSON_LENGTH: str(len(head))}
        return b"".join((head, *contents)), headers

    def error_body(self, error: ApiError) -> Mapping[str, Any]:
        return names.error_body(error, names.MODELS)

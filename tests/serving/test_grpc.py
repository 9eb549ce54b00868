"""gRPC: the client library of Triton, the source system's form of requests, and abuse of every kind."""

from __future__ import annotations

import asyncio
import json
import queue
import signal
import struct
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.utils import InferenceServerException

from inferplane.serving.grpc import schema
from tests.serving.live import Live

NUMPY = {"BYTES": object, "INT32": np.int32, "INT64": np.int64, "FP32": np.float32, "BOOL": np.bool_}
PROMPT = "def main():"
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with Live("--max-num-seqs", "16", "--grpc-port", "0") as live:
        yield live
        assert live.process.poll() is None, live.text[-3000:]
        live.at_rest()
        assert live.stop() == 0


def address(server: Live) -> str:
    return server.event("listening")["grpc"]


@pytest.fixture
def client(server):
    with triton.InferenceServerClient(address(server)) as client:
        yield client


@pytest.fixture
def channel(server):
    with grpc.insecure_channel(address(server)) as channel:
        yield channel


def tensor(name: str, datatype: str, *values: Any) -> triton.InferInput:
    made = triton.InferInput(name, [len(values)], datatype)
    made.set_data_from_numpy(np.array(values, dtype=NUMPY[datatype]))
    return made


def typed(text: str = PROMPT, tokens: int = 12) -> list[triton.InferInput]:
    values = [tensor("text_input", "BYTES", text), tensor("max_tokens", "INT32", tokens)]
    return [*values, tensor("temperature", "FP32", 0.0)]


def native(**fields: Any) -> list[triton.InferInput]:
    request = {"text": PROMPT, "max_dec_len": 8, "temperature": 0.8, "topp": 0.7, **fields}
    return [tensor("IN", "BYTES", json.dumps([request]))]


def call(channel: grpc.Channel, method: str, timeout: float = 60, metadata: Any = None, **fields: Any) -> Any:
    asked, answered = schema.method_types(method)
    bound = channel.unary_unary(
        f"/{schema.SERVICE}/{method}",
        request_serializer=asked.SerializeToString,
        response_deserializer=answered.FromString,
    )
    return bound(asked(**fields), timeout=timeout, metadata=metadata)


def raw(*tensors: tuple[str, str, list[int], bytes], **fields: Any) -> dict[str, Any]:
    """Fields of a request with raw contents."""
    inputs = [{"name": n, "datatype": d, "shape": s} for n, d, s, _ in tensors]
    return {"model_name": "model", "inputs": inputs, "raw_input_contents": [data for *_, data in tensors], **fields}


def string(text: bytes) -> bytes:
    return struct.pack("<I", len(text)) + text


# ---------------------------------------------------------------- about server and model


def test_what_the_server_says_of_itself(client, server):
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("model")
    assert client.get_server_metadata().name == "inferplane"
    metadata = client.get_model_metadata("demo")
    assert {t.name for t in metadata.inputs} >= {"IN", "text_input"} and metadata.versions == ["1"]
    config = client.get_model_config("demo").config
    assert config.model_transaction_policy.decoupled and config.parameters["device"].string_value == "cpu"
    assert [m.state for m in client.get_model_repository_index().models] == ["READY"]
    before = client.get_inference_statistics("demo").model_stats[0]
    client.infer("model", typed(tokens=3))
    after = client.get_inference_statistics("demo").model_stats[0]
    assert after.inference_count == before.inference_count + 1
    assert after.inference_stats.success.ns > before.inference_stats.success.ns
    assert after.execution_count > before.execution_count
    for ask in (lambda: client.is_model_ready("gpt"), lambda: client.get_model_metadata("gpt")):
        with pytest.raises(InferenceServerException, match="not served here"):
            ask()


def test_health_and_reflection(channel):
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", schema.SERVICE):
        assert stub.Check(health_pb2.HealthCheckRequest(service=name)).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as refused:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert refused.value.code() == Code.NOT_FOUND
    watched = stub.Watch(health_pb2.HealthCheckRequest())
    assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
    watched.cancel()
    found = ProtoReflectionDescriptorDatabase(channel)
    assert schema.SERVICE in found.get_services()
    assert found.FindFileContainingSymbol(schema.SERVICE).service[0].method[0].name == "ServerLive"


# ---------------------------------------------------------------- inference


def test_equal_tokens_over_http_and_grpc(client, server):
    with server.client() as http:
        body = {"model": "default", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
        choice = http.post("/v1/completions", json=body).json()["choices"][0]
    whole = client.infer("model", typed(), outputs=[triton.InferRequestedOutput("text_output")])
    assert whole.as_numpy("text_output")[0].decode() == choice["text"]
    assert whole.as_numpy("token_ids") is None  # it was not asked for
    events = [e for e, _ in streamed(client, native(temperature=0, max_dec_len=12, topp=1.0), "greedy")]
    # The native dialect makes `text` a message of a conversation; token ids stay as they are.
    ids = client.infer("model", [tensor("input_ids", "INT64", *tokens_of(server)), *typed()[1:]])
    assert ids.as_numpy("token_ids").tolist() == client.infer("model", typed()).as_numpy("token_ids").tolist()
    assert "".join(e["token"] for e in events) == events[-1]["tokens_all"]


def tokens_of(server: Live) -> list[int]:
    with server.client() as http:
        return http.post("/tokenize", json={"model": "default", "prompt": PROMPT}).json()["tokens"]


def streamed(client: Any, inputs: list[Any], request_id: str, **more: Any) -> list[tuple[Any, Any]]:
    """Events of one request on a stream of its own, with the responses they came in."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        client.async_stream_infer("model", inputs, request_id=request_id, **more)
        found = []
        while True:
            result, error = answers.get(timeout=60)
            if error is not None:
                raise error
            response = result.get_response()
            out = result.as_numpy("OUT")
            found.append((json.loads(out[0]) if out is not None else None, response))
            if response.parameters["triton_final_response"].bool_param:
                return found
    finally:
        client.stop_stream()


def test_the_source_systems_form(client):
    found = streamed(client, native(req_id="42", infer_seed=7), "42", outputs=[triton.InferRequestedOutput("OUT")])
    events = [event for event, _ in found]
    assert all(response.id == "42" and response.model_version == "1" for _, response in found)
    assert [e["send_idx"] for e in events] == list(range(len(events)))
    assert [e["is_end"] for e in events] == [0] * (len(events) - 1) + [1]
    assert all(e["req_id"] == "42" and e["error_code"] == 0 and e["error_msg"] == "" for e in events)
    last = events[-1]
    assert last["tokens_all_num"] == len(last["tokens_all_ids"]) == 8
    again = streamed(client, native(infer_seed=7), "43")
    assert again[-1][0]["tokens_all_ids"] == last["tokens_all_ids"]


def test_a_timeout_as_triton_sends_it_counts_microseconds(client):
    long = [*typed(tokens=1500), tensor("ignore_eos", "BOOL", True)]
    assert client.infer("model", typed(tokens=2), timeout=30_000_000).as_numpy("token_ids").size == 2
    with pytest.raises(InferenceServerException, match=r"time limit, 0\.02 s"):
        client.infer("model", long, timeout=20_000)
    with pytest.raises(InferenceServerException, match=r"time limit, 0\.05 s"):  # a tensor's counts seconds
        client.infer("model", [*long, tensor("timeout", "FP32", 0.05)])


def test_an_empty_final_response_when_asked_for(client):
    found = streamed(client, native(), "1", enable_empty_final_response=True)
    assert found[-1][0] is None and found[-2][0]["is_end"] == 1
    assert [r.parameters["triton_final_response"].bool_param for _, r in found] == [False] * (len(found) - 1) + [True]


def test_one_stream_carries_many_and_outlives_errors(client):
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    bad = {"no-json": [tensor("IN", "BYTES", "[{")], "two": [tensor("IN", "BYTES", '[{"text":"a"},{"text":"b"}]')]}
    bad |= {"no-text": native(text=None), "long": native(max_dec_len=10**6), "odd": native(temperature="warm")}
    for name, inputs in bad.items():
        client.async_stream_infer("model", inputs, request_id=name)
    for i in range(60):
        client.async_stream_infer("model", typed(f"x = {i}", 3), request_id=f"good-{i}", parameters={"stream": False})
    errors, texts = [], {}
    for _ in range(60 + len(bad)):
        result, error = answers.get(timeout=120)
        if error is not None:
            errors.append(str(error))
        else:
            texts[result.get_response().id] = result.as_numpy("text_output")[0]
    client.stop_stream()
    assert len(texts) == 60 and len(errors) == len(bad)
    for words in ("not valid JSON", "holds 2 requests", "is required", "max_dec_len = 1000000", "temperature"):
        assert any(words in e for e in errors), words


def test_the_asynchronous_client_and_cancelling(server):
    async def run() -> None:
        async with triton_aio.InferenceServerClient(address(server)) as client:
            results = await asyncio.gather(*(client.infer("model", typed(f"y = {i}", 4)) for i in range(8)))
            assert all(len(r.as_numpy("token_ids")) <= 4 for r in results)

            async def requests() -> Any:
                yield {"model_name": "model", "inputs": typed(tokens=1500), "request_id": "long"}
                await asyncio.sleep(60)

            stream = client.stream_infer(requests())
            result, error = await stream.__anext__()
            assert error is None and result.get_response().id == "long"
            stream.cancel()
            with pytest.raises(InferenceServerException):
                await client.infer(
                    "model", [*typed(tokens=1500), tensor("ignore_eos", "BOOL", True)], client_timeout=0.2
                )

    asyncio.run(run())
    server.at_rest()


# ---------------------------------------------------------------- abuse


BROKEN = [b"\xff", b"\x0a\x05ab", b"\x0a\xff\xff\xff\xff\x0f", b"\x08\x96\x01\x0a", b"\x00"]


@pytest.mark.parametrize("data", BROKEN)
@pytest.mark.parametrize("method", ["ModelInfer", "ServerMetadata", "ModelMetadata", "ModelReady", "ModelStreamInfer"])
def test_messages_that_are_none(server, method, data):
    """Kind of advisory: malformed protobuf (the answer was UNKNOWN, as for a fault of the server)."""
    path = f"/{schema.SERVICE}/{method}"
    with grpc.insecure_channel(address(server)) as channel:
        sent = iter([data]) if method == "ModelStreamInfer" else data
        call = channel.stream_stream(path) if method == "ModelStreamInfer" else channel.unary_unary(path)
        with pytest.raises(grpc.RpcError) as refused:
            list(call(sent, timeout=30))
    assert refused.value.code() == Code.INVALID_ARGUMENT, refused.value.details()
    assert "message is no" in refused.value.details()
    server.at_rest()


BAD: dict[str, tuple[dict[str, Any], Any]] = {
    "no inputs": (raw(), Code.INVALID_ARGUMENT),
    "unknown model": ({**raw(), "model_name": "gpt"}, Code.NOT_FOUND),
    "unknown version": ({**raw(), "model_version": "2"}, Code.NOT_FOUND),
    "unknown input": (raw(("frobs", "INT32", [1], b"\1\0\0\0")), Code.INVALID_ARGUMENT),
    "IN of another datatype": (raw(("IN", "INT32", [1], b"\1\0\0\0")), Code.INVALID_ARGUMENT),
    "IN with a shape of two": (raw(("IN", "BYTES", [2], string(b"{}"))), Code.INVALID_ARGUMENT),
    "IN empty": (raw(("IN", "BYTES", [0], b"")), Code.INVALID_ARGUMENT),
    "IN beside text_input": (
        raw(("IN", "BYTES", [1], string(b"{}")), ("text_input", "BYTES", [1], string(b"x"))),
        Code.INVALID_ARGUMENT,
    ),
    "a negative shape": (raw(("text_input", "BYTES", [-1], string(b"x"))), Code.INVALID_ARGUMENT),
    "a huge shape": (raw(("text_input", "BYTES", [2**40, 2**40], string(b"x"))), Code.INVALID_ARGUMENT),
    "a length that lies": (raw(("text_input", "BYTES", [1], b"\xff\xff\xff\x7fx")), Code.INVALID_ARGUMENT),
    "a length cut off": (raw(("text_input", "BYTES", [1], b"\1\0")), Code.INVALID_ARGUMENT),
    "no UTF-8": (raw(("text_input", "BYTES", [1], string(b"\xff\xfe"))), Code.INVALID_ARGUMENT),
    "an odd number of bytes": (raw(("max_tokens", "INT32", [1], b"\1\0\0")), Code.INVALID_ARGUMENT),
    "an unknown datatype": (raw(("max_tokens", "INT33", [1], b"\1\0\0\0")), Code.INVALID_ARGUMENT),
    "more tensors than contents": (
        {**raw(("text_input", "BYTES", [1], string(b"x"))), "raw_input_contents": [b"", b""]},
        Code.INVALID_ARGUMENT,
    ),
    "the same input twice": (
        raw(("text_input", "BYTES", [1], string(b"x")), ("text_input", "BYTES", [1], string(b"y"))),
        Code.INVALID_ARGUMENT,
    ),
    "raw contents and contents": (
        {
            "model_name": "model",
            "inputs": [
                {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"x"]}}
            ],
            "raw_input_contents": [string(b"x")],
        },
        Code.INVALID_ARGUMENT,
    ),
    "text and ids": (
        raw(("text_input", "BYTES", [1], string(b"x")), ("input_ids", "INT32", [1], b"\1\0\0\0")),
        Code.INVALID_ARGUMENT,
    ),
    "ids outside of the vocabulary": (raw(("input_ids", "INT32", [1], b"\xff\xff\xff\x7f")), Code.INVALID_ARGUMENT),
    "NaN": (
        raw(("text_input", "BYTES", [1], string(b"x")), ("temperature", "FP32", [1], struct.pack("<f", float("nan")))),
        Code.INVALID_ARGUMENT,
    ),
    "sampling parameters that are no object": (
        raw(("text_input", "BYTES", [1], string(b"x")), ("sampling_parameters", "BYTES", [1], string(b"[1]"))),
        Code.INVALID_ARGUMENT,
    ),
    "n": (raw(("text_input", "BYTES", [1], string(b"x")), ("n", "INT32", [1], b"\2\0\0\0")), Code.INVALID_ARGUMENT),
    "deep JSON": (raw(("IN", "BYTES", [1], string(b"[" * 100_000))), Code.INVALID_ARGUMENT),
    "a message of 5 MB": (raw(("text_input", "BYTES", [1], string(b"x" * 5_000_000))), Code.RESOURCE_EXHAUSTED),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requests_get_their_status(channel, case):
    fields, code = BAD[case]
    with pytest.raises(grpc.RpcError) as refused:
        call(channel, "ModelInfer", **fields)
    assert refused.value.code() == code, refused.value.details()
    assert call(channel, "ServerReady").ready


def test_other_methods_are_unimplemented_and_bytes_that_are_no_message_end_the_call(channel):
    for method in ("SystemSharedMemoryRegister", "RepositoryModelLoad", "TraceSetting"):
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/{schema.SERVICE}/{method}")(b"", timeout=30)
        assert refused.value.code() == Code.UNIMPLEMENTED
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(f"/{schema.SERVICE}/ModelInfer")(b"\xff" * 100, timeout=30)
    assert refused.value.code() == Code.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as refused:
        call(channel, "ServerReady", metadata=[("x", "y" * 2**20)])
    assert refused.value.code() in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.INTERNAL)
    assert call(channel, "ServerReady").ready


def test_bytes_that_are_no_message_end_a_stream_and_what_ran_on_it(channel, server):
    """The caller gets an error at once; the requests that it had begun end, and nothing waits for ever."""
    tokens = ("max_tokens", "INT32", [1], struct.pack("<i", 1500))
    fields = raw(("text_input", "BYTES", [1], string(b"x")), tokens, ("ignore_eos", "BOOL", [1], b"\1"), id="long")
    long = schema.message("ModelInferRequest")(**fields)

    def bodies() -> Iterator[bytes]:
        yield long.SerializeToString()
        time.sleep(0.3)
        yield b"\xff" * 100
        time.sleep(30)

    stream = channel.stream_stream(f"/{schema.SERVICE}/ModelStreamInfer")(bodies(), timeout=25)
    with pytest.raises(grpc.RpcError) as refused:
        for _ in stream:
            pass
    assert refused.value.code() in (Code.INVALID_ARGUMENT, Code.INTERNAL), refused.value
    server.at_rest()


def test_a_request_id_may_live_once(channel, server):
    def requests() -> Iterator[Any]:
        for tokens in (1500, 5):
            text = ("text_input", "BYTES", [1], string(PROMPT.encode()))
            yield asked(**raw(text, ("max_tokens", "INT32", [1], struct.pack("<i", tokens)), id="twice"))

    asked, answered = schema.method_types("ModelStreamInfer")
    stream = channel.stream_stream(
        f"/{schema.SERVICE}/ModelStreamInfer",
        request_serializer=asked.SerializeToString,
        response_deserializer=answered.FromString,
    )(requests(), timeout=60)
    said = next(r for r in stream if r.error_message)
    assert "is alive" in said.error_message and said.infer_response.id == "twice"
    stream.cancel()
    server.at_rest()


# ---------------------------------------------------------------- a server's life


def test_keys_and_draining(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("right\n")
    with Live("--grpc-port", "0", "--api-key-file", str(keys)) as live, grpc.insecure_channel(address(live)) as channel:
        methods = [m for m in schema.METHODS if m not in ("ServerLive", "ServerReady", "ModelStreamInfer")]
        for headers in (
            [],
            [("authorization", "Bearer wrong")],
            [("authorization", "right")],
            [("x-api-key", "right")],
        ):
            for method in methods:
                with pytest.raises(grpc.RpcError) as refused:
                    call(channel, method, metadata=headers)
                assert refused.value.code() == Code.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream(f"/{schema.SERVICE}/ModelStreamInfer")(iter([b""])))
        assert refused.value.code() == Code.UNAUTHENTICATED
        assert call(channel, "ServerLive").live and call(channel, "ServerReady").ready
        right = [("authorization", "Bearer right")]
        assert call(channel, "ModelReady", metadata=right, name="demo").ready

        # Draining: what runs ends, what is new is refused.
        text = ("text_input", "BYTES", [1], string(PROMPT.encode()))
        asked = schema.message("ModelInferRequest")
        long = asked(**raw(text, ("max_tokens", "INT32", [1], struct.pack("<i", 40)), id="long"))
        answered = schema.message("ModelStreamInferResponse")
        pieces = channel.stream_stream(
            f"/{schema.SERVICE}/ModelStreamInfer",
            request_serializer=asked.SerializeToString,
            response_deserializer=answered.FromString,
        )(iter([long]), timeout=60, metadata=right)
        first = next(pieces)
        assert not first.error_message
        live.process.send_signal(signal.SIGTERM)
        live.event("draining")
        with pytest.raises(grpc.RpcError) as refused:
            call(channel, "ModelInfer", metadata=right, **raw(text))
        assert refused.value.code() == Code.UNAVAILABLE
        rest = list(pieces)
        assert rest[-1].infer_response.parameters["triton_final_response"].bool_param
        assert live.process.wait(60) == 0


def test_a_port_that_is_taken(server):
    port = address(server).rpartition(":")[2]
    with pytest.raises(AssertionError, match="cannot be had"):
        Live("--grpc-port", port)

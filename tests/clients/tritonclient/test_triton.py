"""Triton's client over HTTP and gRPC."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

PROMPT = "Question: What is two plus two?\nAnswer:"
KINDS = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_}


def inputs(protocol: Any, **values: tuple[str, Any]) -> list[Any]:
    made = []
    for name, (kind, value) in values.items():
        made.append(protocol.InferInput(name, [1], kind))
        made[-1].set_data_from_numpy(np.array([value], dtype=KINDS[kind]))
    return made


def question(protocol: Any, **more: tuple[str, Any]) -> list[Any]:
    return inputs(protocol, text_input=("BYTES", PROMPT), max_tokens=("INT32", 4), temperature=("FP32", 0.0), **more)


@pytest.fixture(scope="module")
def over_grpc(server):
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def over_http(server):
    with tritonclient.http.InferenceServerClient(server.url.partition("//")[2]) as client:
        yield client


def test_health(over_grpc, over_http):
    assert over_grpc.is_server_live() and over_grpc.is_server_ready() and over_grpc.is_model_ready("scripted")
    assert over_http.is_server_live() and over_http.is_server_ready()


def test_text_over_grpc(over_grpc):
    done = over_grpc.infer("scripted", question(tritonclient.grpc))
    assert done.as_numpy("text_output")[0].decode().split() == ["four"]


@pytest.mark.parametrize("is_binary", [True, False])
def test_text_over_http(over_http, is_binary):
    asked = [tritonclient.http.InferRequestedOutput(n, binary_data=is_binary) for n in ("text_output", "token_ids")]
    for outputs in (None, asked):
        done = over_http.infer("scripted", question(tritonclient.http), outputs=outputs, request_id="r1")
        found = done.as_numpy("text_output")[0]
        assert (found.decode() if isinstance(found, bytes) else found).split() == ["four"]
        assert done.as_numpy("token_ids").dtype == np.int32 and done.get_response()["id"] == "r1"


def test_the_model_over_http(over_http):
    assert over_http.is_model_ready("scripted") and over_http.get_server_metadata()["name"] == "inferplane"
    assert "text_input" in [tensor["name"] for tensor in over_http.get_model_metadata("scripted")["inputs"]]


def test_a_stream_over_grpc(over_grpc):
    arrived: queue.Queue[Any] = queue.Queue()
    over_grpc.start_stream(lambda result, error: arrived.put(error or result))
    over_grpc.async_stream_infer(
        "scripted", question(tritonclient.grpc, stream=("BOOL", True)), enable_empty_final_response=True
    )
    text = ""
    while True:
        result = arrived.get(timeout=30)
        assert not isinstance(result, InferenceServerException), result
        found = result.as_numpy("text_output")
        text += found[0].decode() if found is not None and len(found) else ""
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    over_grpc.stop_stream()
    assert text.split() == ["four"]


def test_a_wrong_name_is_an_error_of_the_client(over_grpc, over_http):
    with pytest.raises(InferenceServerException, match="not served here"):
        over_grpc.infer("gpt", question(tritonclient.grpc))
    with pytest.raises(InferenceServerException, match="not served here"):
        over_http.infer("gpt", question(tritonclient.http))

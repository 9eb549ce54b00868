"""KServe's inference protocol over HTTP: as JSON and with binary tensors, with the limits and errors of gRPC's side."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest

from tests.serving.live import Live

INFER = "/v2/models/demo/infer"
PROMPT = "def main():"
LENGTH = "inference-header-content-length"


def text_input(name: str, value: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": [1], "datatype": "BYTES", "data": [value], **more}


def number(name: str, value: Any, datatype: str = "INT32", **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": [1], "datatype": datatype, "data": [value], **more}


def question(*more: dict[str, Any], **fields: Any) -> dict[str, Any]:
    greedy = number("temperature", 0, "FP32")
    return {"inputs": [text_input("text_input", PROMPT), number("max_tokens", 5), greedy, *more], **fields}


def outputs(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return {output["name"]: output["data"] for output in answer.json()["outputs"]}


@pytest.fixture
def want(client):
    sent = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0}
    return client.post("/v1/completions", json=sent).json()["choices"][0]["text"]


def test_as_json(client, want):
    answer = client.post(INFER, json=question(id="a1"))
    body = answer.json()
    assert {k: body[k] for k in ("model_name", "model_version", "id")} == {
        "model_name": "demo",
        "model_version": "1",
        "id": "a1",
    }
    found = outputs(answer)
    assert found["text_output"] == [want] and found["finish_reason"] == ["length"] and len(found["token_ids"]) == 5
    again = client.post("/v2/models/demo/versions/1/infer", json=question(outputs=[{"name": "token_ids"}]))
    assert outputs(again) == {"token_ids": found["token_ids"]} and "id" not in again.json()
    tokens = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    nested = {"name": "input_ids", "shape": [1, len(tokens)], "datatype": "INT64", "data": [tokens]}
    parameters = {"max_tokens": 5, "temperature": 0.0}
    assert outputs(client.post(INFER, json={"inputs": [nested], "parameters": parameters})) == found
    native = json.dumps({"text": PROMPT, "max_dec_len": 5, "temperature": 0.0, "req_id": "n1"})
    event = json.loads(outputs(client.post(INFER, json={"inputs": [text_input("IN", native)]}))["OUT"][0])
    assert event["result"] == want and event["req_id"] == "n1"


def test_binary_tensors(client, want):
    text = PROMPT.encode()
    raw = [struct.pack("<I", len(text)) + text, np.int32(5).tobytes(), np.float32(0).tobytes()]
    inputs = [
        {"name": name, "shape": [1], "datatype": kind, "parameters": {"binary_data_size": len(data)}}
        for (name, kind), data in zip(
            (("text_input", "BYTES"), ("max_tokens", "INT32"), ("temperature", "FP32")), raw, strict=True
        )
    ]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    answer = client.post(INFER, content=b"".join((head, *raw)), headers={LENGTH: str(len(head))})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/octet-stream"
    length = int(answer.headers[LENGTH])
    described, contents = json.loads(answer.content[:length])["outputs"], answer.content[length:]
    found = {}
    for output in described:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]], contents = contents[:size], contents[size:]
    assert contents == b"" and found["text_output"] == struct.pack("<I", len(want.encode())) + want.encode()
    assert len(np.frombuffer(found["token_ids"], "<i4")) == 5
    asked = [{"name": "text_output"}, {"name": "token_ids", "parameters": {"binary_data": True}}]
    mixed = client.post(INFER, json=question(outputs=asked))
    body = json.loads(mixed.content[: int(mixed.headers[LENGTH])])["outputs"]
    assert body[0]["data"] == [want] and mixed.content.endswith(found["token_ids"])
    for size in (len(head) + len(b"".join(raw)) + 1, "x", -1):
        wrong = client.post(INFER, content=b"".join((head, *raw)), headers={LENGTH: str(size)})
        assert wrong.status_code == 400 and wrong.json()["param"] == LENGTH
    assert client.post(INFER, content=head, headers={LENGTH: str(len(head))}).json()["param"] == "text_input"
    beyond = client.post(INFER, content=b"".join((head, *raw, b"x")), headers={LENGTH: str(len(head))})
    assert beyond.status_code == 400 and "follow the JSON" in beyond.json()["error"]


def test_what_there_is(client):
    server = client.get("/v2").json()
    assert server["name"] == "inferplane" and server["extensions"] == ["binary_tensor_data"]
    for path in ("/v2/models/demo", "/v2/models/model/versions/1"):
        found = client.get(path).json()
        names = {tensor["name"]: tensor["shape"] for tensor in found["inputs"]}
        assert names["text_input"] == [1] and names["input_ids"] == [-1] and found["versions"] == ["1"]
    assert client.get("/v2/models/demo/ready").json() == {"name": "demo", "ready": True}
    assert client.get("/v2/models/demo/versions/1/ready").status_code == 200
    refused = client.get(INFER)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("path", "sent", "status", "says"),
    [
        ("/v2/models/gpt/infer", question(), 404, "not served here"),
        ("/v2/models/demo/versions/2/infer", question(), 404, "no version '2'"),
        (INFER, {}, 400, "inputs: it is required"),
        (INFER, question(number("n", 2)), 400, "n is 1 here"),
        (INFER, question(number("nn", 2)), 400, "no input 'nn'"),
        (INFER, question(number("seed", 2**31)), 400, "is no INT32"),
        (INFER, question(number("seed", "2")), 400, "is no INT32"),
        (INFER, question(number("stream", 1, "BOOL")), 400, "is no BOOL"),
        (INFER, question(number("stream", True, "BOOL")), 400, "stream = true: an answer here is whole"),
        (INFER, question(parameters={"stream": True}), 400, "stream = true"),
        ("/v2/models/de%0Amo/infer", question(), 400, "control character U+000A"),
        ("/v2/models/demo%00/infer", question(), 400, "control character U+0000"),
        ("/v2/models/demo/versions/1%7F/infer", question(), 400, "control character U+007F"),
        (INFER, question(number("top_p", True, "FP32")), 400, "is no FP32"),
        (INFER, question(number("seed", 1, "FP16")), 400, "datatype 'FP16'"),
        (INFER, question({"name": "seed", "shape": [2], "datatype": "INT32", "data": [1, 2]}), 400, "at most 1"),
        (INFER, question({"name": "seed", "shape": [1], "datatype": "INT32", "data": [1, 2]}), 400, "shape says 1"),
        (INFER, question({"name": "seed", "shape": [1], "datatype": "INT32"}), 400, "data or binary_data_size"),
        (INFER, question({**number("seed", 1), "data": [[[[[[[[[1]]]]]]]]]}), 400, "lists in more than 8"),
        (INFER, question(number("seed", 1, parameters={"shared_memory_region": "r"})), 400, "shared_memory_region"),
        (INFER, question(number("max_tokens", 6)), 400, "Two inputs"),
        (INFER, question(outputs=[{"name": "logits"}]), 400, "no output 'logits'"),
        (INFER, question(outputs=[{"name": "OUT", "parameters": {"classification": 3}}]), 400, "classification"),
        (INFER, {"inputs": [number("max_tokens", 5)]}, 400, "text_input"),
    ],
)
def test_errors_are_texts(client, path, sent, status, says):
    answer = client.post(path, json=sent)
    assert answer.status_code == status and says in answer.json()["error"], answer.text
    assert answer.json()["code"]


def test_other_types_are_for_programs_alone(client):
    """A web page can make a browser send any text, which then has the page's origin."""
    body = json.dumps(question()).encode()
    for headers in ({}, {"content-type": "application/octet-stream"}):
        assert client.post(INFER, content=body, headers=headers).status_code == 200
        refused = client.post(INFER, content=body, headers={**headers, "origin": "http://example.org"})
        assert refused.status_code == 415 and "application/json" in refused.json()["error"]


def test_keys_and_slots():
    with Live("--max-num-seqs", "1", "--max-waiting", "0", "--api-key", "k") as server, server.client() as client:
        for method, path in (("POST", INFER), ("GET", "/v2/models/demo")):
            refused = httpx.request(method, server.url + path, json=question() if method == "POST" else None)
            assert (refused.status_code, refused.json()["code"]) == (401, "invalid_api_key")
        long = question(number("max_tokens", 400))
        long["inputs"] = [i for i in long["inputs"] if i.get("data") != [5]]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: client.post(INFER, json=long), range(8)))
        assert {answer.status_code for answer in answers} == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert isinstance(refused.json()["error"], str) and refused.headers["retry-after"]
        server.at_rest()


def test_answers_fit_their_description(client):
    document = client.get("/openapi.json").json()
    for path, method, answer in (
        ("/v2", "get", client.get("/v2")),
        ("/v2/models/{model}", "get", client.get("/v2/models/demo")),
        ("/v2/models/{model}/infer", "post", client.post(INFER, json=question())),
        ("/v2/models/{model}/infer", "post", client.post(INFER, json={})),
    ):
        shape = document["paths"][path][method]["responses"][str(answer.status_code)]
        schema = shape["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), {**schema, "components": document["components"]})


@pytest.mark.parametrize("timeout", [10**400, -1, 2**63, 5.0, "5", True, [1]])
def test_a_time_limit_that_is_no_integer_of_microseconds_is_refused(client, timeout):
    body = json.dumps(question(parameters={"timeout": timeout}))
    answer = client.post(INFER, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "timeout" in answer.json()["error"], answer.text

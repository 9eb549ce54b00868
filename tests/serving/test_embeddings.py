"""Embeddings by the official client: equal to `LLM.embed`, for every form of input."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from dataclasses import replace

import openai
import pytest

from inferplane import LLM
from tests.serving.faults import Small, run

TEXTS = ["def main():", "import os\n" * 30, "x"]
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def ours() -> dict[str, list[list[float]]]:
    """The same by the library: bfloat16 is as far off as steps of other sizes make it."""
    with LLM("demo", device="cpu") as llm:
        return {pooling: llm.embed(TEXTS, pooling) for pooling in ("last", "mean")}


@pytest.fixture
def api(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api


def likeness(a: list[float], b: list[float]) -> float:
    """The cosine of two vectors of length 1."""
    assert len(a) == len(b)
    assert sum(x * x for x in a) == pytest.approx(1, abs=1e-5)
    return sum(x * y for x, y in zip(a, b))


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("form", ["float", "base64", None])
def test_vectors(api, ours, pooling, form):
    more = {} if form is None else {"encoding_format": form}  # by itself the client asks for base64, and decodes it
    answer = api.embeddings.create(model="default", input=TEXTS, extra_body={"pooling": pooling}, **more)
    assert [d.index for d in answer.data] == [0, 1, 2] and answer.model == "demo"
    tokens = answer.usage.prompt_tokens
    assert answer.usage.total_tokens == tokens > 30
    for found, want in zip(answer.data, ours[pooling]):
        vector: object = found.embedding
        if form == "base64":
            data = base64.b64decode(vector)
            vector = list(struct.unpack(f"<{len(data) // 4}f", data))
        assert likeness(vector, want) > 0.999


def test_last_is_the_default_and_text_is_as_good_as_tokens(api, server):
    with server.client() as client:
        ids = client.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"]
    inputs = [TEXTS[0], [TEXTS[0]], ids, [ids]]
    found = [api.embeddings.create(model="demo", input=i).data[0].embedding for i in inputs]
    found.append(api.embeddings.create(model="demo", input=ids, extra_body={"pooling": "last"}).data[0].embedding)
    assert all(likeness(found[0], other) > 0.999 for other in found)
    mean = api.embeddings.create(model="demo", input=ids, extra_body={"pooling": "mean"}).data[0].embedding
    assert likeness(found[0], mean) < 0.99


def test_fewer_dimensions(api, ours):
    found = api.embeddings.create(model="demo", input=TEXTS[0], dimensions=16).data[0].embedding
    length = sum(x * x for x in ours["last"][0][:16]) ** 0.5
    assert likeness(found, [x / length for x in ours["last"][0][:16]]) > 0.999


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": ["x", 5]}, "input[1]"),
        ({"input": [5, -1]}, "input[1]"),
        ({"input": [5, "x"]}, "input[1]"),
        ({"input": [[1], [2, -1]]}, "input[1][1]"),
        ({"input": [10**6]}, "input"),
        ({"input": [5] * 3000}, "input"),
        ({"input": ["x"] * 100}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 257}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": "x", "model": 5}, "model"),
    ],
)
def test_each_slip_is_named(client, fields, param):
    answer = client.post(PATH, json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


@pytest.mark.parametrize("given", [5, "", [], {"text": "x"}, None, True])
def test_the_error_for_an_invalid_input_lists_all_forms(client, given):
    said = client.post(PATH, json={"input": given}).json()["error"]["message"]
    forms = "a text, a list of texts, a list of token ids, a list of lists of token ids; none empty"
    assert said == f"input: it is none of these: {forms}."
    assert client.post(PATH, json={}).json()["error"]["message"] == f"input: it is required: {forms}."


def test_models_and_fields_that_are_not_known(client):
    answer = client.post(PATH, json={"input": "x", "model": "gpt-9"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    answer = client.post(PATH, json={"input": "x", "text": "y"}).raise_for_status()
    assert answer.headers["x-inferplane-ignored"] == "text"


def test_many_at_once_beside_streams_keep_to_their_own(server, ours):
    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:

            async def vectors(i: int) -> None:
                found = await api.embeddings.create(model="default", input=TEXTS[i % 3])
                assert likeness(found.data[0].embedding, ours["last"][i % 3]) > 0.999

            async def text() -> str:
                made = await api.completions.create(model="default", prompt="def main():", max_tokens=20, temperature=0)
                return made.choices[0].text

            alone = await text()
            *_, one, two = await asyncio.gather(*(vectors(i) for i in range(24)), text(), text())
            assert one == two == alone

    asyncio.run(work())
    server.at_rest()


def test_the_pooling_setting_is_the_default(tmp_path):
    async def work(server: Small) -> None:
        assert server.service is not None
        server.service.settings = replace(server.service.settings, pooling="mean")

        async def vector(**more: str) -> list[float]:
            status, text, _ = await server.send(PATH, {"input": TEXTS[0], **more})
            assert status == 200
            return json.loads(text)["data"][0]["embedding"]

        last = await vector(pooling="last")
        assert await vector() == await vector(pooling="mean") != last

    run(tmp_path, work)

"""The source system's published client examples, unchanged, against this server.

The two programs below are those of https://paddlenlp.readthedocs.io, "llm/server", sections "HTTP" and "OpenAI"; they
stand for the interface that its clients were written to. Two things differ: the address, which there is a placeholder
without quotes, and the indentation, which the page has lost. What they print is caught and looked at.
"""

from __future__ import annotations

import ast
import json

import pytest
import requests

NATIVE = """
import uuid
import json
import requests

ip = "{ip}"
service_http_port = "{port}"
url = f"http://{{ip}}:{{service_http_port}}/v1/chat/completions"
req_id = str(uuid.uuid1())
data_single = {{
    "text": "Hello, how are you?",
    "req_id": req_id,
    "max_dec_len": 64,
    "stream": True,
}}
res = requests.post(url, json=data_single, stream=True)
for line in res.iter_lines():
    print(json.loads(line))

data_multi = {{
    "messages": [
        {{"role": "user", "content": "Hello, who are you"}},
        {{"role": "system", "content": "I'm a helpful AI assistant."}},
        {{"role": "user", "content": "List 3 countries and their capitals."}},
    ],
    "req_id": req_id,
    "max_dec_len": 64,
    "stream": True,
}}
res = requests.post(url, json=data_multi, stream=True)
for line in res.iter_lines():
    print(json.loads(line))
"""

OPENAI = """
import openai

ip = "{ip}"
service_http_port = "{port}"
client = openai.Client(base_url=f"http://{{ip}}:{{service_http_port}}/v1/chat/completions", api_key="EMPTY_API_KEY")
response = client.completions.create(
    model="default",
    prompt="Hello, how are you?",
    max_tokens=50,
    stream=False,
)
print(response)
print("\\n")
response = client.completions.create(
    model="default",
    prompt="Hello, how are you?",
    max_tokens=100,
    stream=True,
)
for chunk in response:
    if chunk.choices[0] is not None:
        print(chunk.choices[0].text, end='')
print("\\n")
response = client.chat.completions.create(
    model="default",
    messages=[
        {{"role": "user", "content": "Hello, who are you"}},
        {{"role": "system", "content": "I'm a helpful AI assistant."}},
        {{"role": "user", "content": "List 3 countries and their capitals."}},
    ],
    temperature=0,
    max_tokens=64,
    stream=False,
)
print(response)
print("\\n")
response = client.chat.completions.create(
    model="default",
    messages=[
        {{"role": "user", "content": "Hello, who are you"}},
        {{"role": "system", "content": "I'm a helpful AI assistant."}},
        {{"role": "user", "content": "List 3 countries and their capitals."}},
    ],
    temperature=0,
    max_tokens=64,
    stream=True,
)
for chunk in response:
    if chunk.choices[0].delta is not None:
        print(chunk.choices[0].delta.content, end='')
print("\\n")
"""


def run(program: str, server, capsys) -> str:
    exec(compile(program.format(ip="127.0.0.1", port=server.port), "example", "exec"), {})
    return capsys.readouterr().out


def test_native_example(server, capsys):
    events = [ast.literal_eval(line) for line in run(NATIVE, server, capsys).splitlines()]
    ends = [i for i, e in enumerate(events) if e["is_end"] == 1]
    assert len(ends) == 2 and ends[1] == len(events) - 1
    for part in (events[: ends[0] + 1], events[ends[0] + 1 :]):
        assert all(e["error_msg"] == "" and e["error_code"] == 0 for e in part)
        assert [e["send_idx"] for e in part] == list(range(len(part)))
        assert len({e["req_id"] for e in part}) == 1
        last = part[-1]
        assert last["tokens_all_ids"] == [t for e in part for t in e["token_ids"]]
        assert last["tokens_all_num"] == len(last["tokens_all_ids"]) <= 64
        assert last["tokens_all"] == "".join(e["token"] for e in part)


def test_openai_example(server, capsys):
    out = run(OPENAI, server, capsys)
    assert out.startswith("Completion(")
    assert "ChatCompletion(" in out
    assert out.count("finish_reason=") >= 2


# ---------------------------------------------------------------- the rest of that interface


def ask(server, path="/v1/chat/completions", **body):
    return requests.post(server.url + path, json=body, timeout=60)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_native_without_a_stream(server, path):
    body = {
        "text": "def main():",
        "req_id": f"whole{path.count('/')}",
        "max_dec_len": 8,
        "topp": 0,
        "return_usage": True,
    }
    answer = ask(server, path, **body).json()
    assert answer["tokens_all"] == answer["result"] != ""
    assert (answer["error_msg"], answer["error_code"]) == ("", 0)
    assert answer["usage"]["completion_tokens"] == answer["tokens_all_num"] == 8
    assert answer["req_id"] == body["req_id"]


def test_native_defaults_and_aliases(server):
    cards = requests.get(f"{server.url}/v1/models", timeout=30).json()["data"]
    assert cards[0]["defaults"]["native"] == {"temperature": 0.95, "topp": 0.7, "min_dec_len": 1}
    one = ask(server, text="x = ", max_dec_len=6, infer_seed=4).json()
    two = ask(server, text="x = ", max_tokens=6, seed=4, topp=0.7, temperature=0.95, penalty_score=1.0).json()
    assert one["tokens_all_ids"] == two["tokens_all_ids"]
    ids = requests.post(f"{server.url}/tokenize", json={"prompt": "x = "}, timeout=30).json()["tokens"]
    assert ask(server, input_ids=ids, max_dec_len=6, infer_seed=4).json()["tokens_all_ids"] == one["tokens_all_ids"]


def test_native_return_all_tokens_is_one_event(server):
    answer = ask(server, text="x", max_dec_len=5, stream=True, return_all_tokens=True)
    (event,) = [json.loads(line) for line in answer.iter_lines()]
    assert event["is_end"] == 1 and len(event["token_ids"]) == 5


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"text": ""}, 400, "text"),
        ({"text": 5}, 400, "text"),
        ({"text": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "messages"),
        ({"req_id": "nothing"}, 400, "text"),
        ({"text": "x", "max_dec_len": 0}, 400, "max_dec_len"),
        ({"text": "x", "max_dec_len": 99999}, 400, "max_dec_len"),
        ({"text": "x", "min_dec_len": 9, "max_dec_len": 8}, 400, "min_dec_len"),
        ({"text": "x", "topp": 1.5}, 400, "topp"),
        ({"text": "x", "topp": 0.5, "top_p": 0.5}, 400, "top_p"),
        ({"text": "x", "temperature": -0.1}, 400, "temperature"),
        ({"text": "x", "penalty_score": 0}, 400, "penalty_score"),
        ({"text": "x", "eos_token_ids": [4096]}, 400, "eos_token_ids"),
        ({"text": "x", "response_type": "openai"}, 400, "response_type"),
        ({"input_ids": [5000]}, 400, "input_ids"),
        ({"text": "x", "stream": "yes"}, 400, "stream"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_native_errors(server, body, status, param, stream):
    answer = ask(server, **{"stream": stream, **body})
    said = answer.json()
    assert answer.status_code == said["error_code"] == status
    assert said["error_msg"]
    assert said["param"] == param


def test_native_id_lives_once(server):
    body = {"text": "x", "req_id": "twice", "max_dec_len": 1500}
    with requests.post(f"{server.url}/v1/completions", json={**body, "stream": True}, stream=True, timeout=60) as first:
        lines = first.iter_lines()  # kept: without it the connection is closed
        next(lines)
        answer = ask(server, **body)
        assert (answer.status_code, answer.json()["error_code"], answer.json()["req_id"]) == (409, 409, "twice")
    server.at_rest()
    assert ask(server, **{**body, "max_dec_len": 2}).status_code == 200

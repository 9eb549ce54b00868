"""Time limits and constraints in every dialect."""

from __future__ import annotations

import itertools
import json

import pytest


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "native"])
def test_every_dialect_has_a_timeout(server, path):
    body = {"max_tokens": 1500, "timeout": 0.3}
    if path != "native":  # which has no such field
        body["ignore_eos"] = True
    if path == "/v1/chat/completions":
        body["messages"] = [{"role": "user", "content": "x"}]
    else:
        body |= {"prompt": "x = ["} if path != "native" else {"text": "x = [", "min_dec_len": 1500}
    with server.client() as client:
        answer = client.post("/v1/completions" if path == "native" else path, json=body)
        assert answer.status_code == 408, answer.text
        assert "timeout" not in answer.headers.get("x-inferplane-ignored", "")


def test_completions_are_constrained_as_chats_are(server):
    body = {"prompt": "x = ", "max_tokens": 200, "temperature": 0}
    pair = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**pair, "additionalProperties": False}}}
    with server.client() as client:

        def text(**more: object) -> str:
            answer = client.post("/v1/completions", json={**body, **more})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        assert list(json.loads(text(response_format=form))) == ["a"]
        assert text(regex="[ab]{4}z") in {f"{''.join(word)}z" for word in itertools.product("ab", repeat=4)}
        assert text(grammar='start: "one" | "two"') in ("one", "two")
        for more in ({"regex": "a", "grammar": 'start: "a"'}, {"text": "x", "prompt": None, "regex": "a"}):
            answer = client.post("/v1/completions", json={**body, **more})
            assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("grammar", ["start: <|eos|>", "start: <[1]>", "start: <[0-1]>", 'start: "a" <|eos|>'])
def test_a_grammar_that_names_an_end_token_ends_with_it(server, grammar):
    with server.client() as client:
        for path in ("/v1/completions", "/v1/chat/completions"):
            text = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
            answer = client.post(path, json={**text, "max_tokens": 20, "temperature": 0, "grammar": grammar})
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["finish_reason"] == "stop"
            else:
                assert answer.status_code == 400 and ".." not in answer.json()["error"]["message"], answer.text


def test_what_asks_again_and_again_is_no_news(server):
    with server.client() as client:
        for path in ("/health", "/v2/health/live", "/v2/health/ready", "/metrics"):
            assert client.get(path, headers={"x-request-id": "probe"}).status_code == 200
        assert client.get("/metrics/none", headers={"x-request-id": "lost"}).status_code == 404
    server.event("request", request_id="lost")
    assert not any(event.get("request_id") == "probe" for event in server.log)

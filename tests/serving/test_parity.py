"""The same greedy tokens over every protocol and dialect."""

from __future__ import annotations

import json

import pytest

from inferplane import LLM, SamplingParams

PROMPTS = ["import os\n", "def fibonacci(n):\n    ", "class Stack:\n", "# é€😀 text\nx = [", "for i in range(10):"]
TOKENS = 24


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM("demo", device="cpu") as llm:
        results = llm.generate(PROMPTS, SamplingParams(max_tokens=TOKENS, temperature=0))
        assert len({tuple(r.token_ids) for r in results}) == len(PROMPTS)
        return [r.token_ids for r in results]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["openai", "native"])
def test_greedy_tokens(client, expected, path, stream, dialect):
    for prompt, want in zip(PROMPTS, expected):
        body = {"temperature": 0, "stream": stream}
        if dialect == "native":
            body.update(text=prompt, max_dec_len=TOKENS)
        else:
            chat = {"messages": [{"role": "user", "content": prompt}]}  # this model's template adds nothing
            body.update(chat if "chat" in path else {"prompt": prompt}, max_tokens=TOKENS, return_token_ids=True)
        answer = client.post(path, json=body).raise_for_status()
        assert tokens_of(answer.text, stream, dialect) == want


def tokens_of(text: str, stream: bool, dialect: str) -> list[int]:
    if not stream:
        answer = json.loads(text)
        return answer["tokens_all_ids"] if dialect == "native" else answer["choices"][0]["token_ids"]
    if dialect == "native":
        return [t for line in text.splitlines() for t in json.loads(line)["token_ids"]]
    *events, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert done == "[DONE]"
    return [t for e in events for c in json.loads(e)["choices"] for t in c.get("token_ids", ())]


def test_side_by_side_and_through_token_ids(client, expected):
    ids = [client.post("/tokenize", json={"prompt": p}).json()["tokens"] for p in PROMPTS]
    body = {"prompt": ids, "temperature": 0, "max_tokens": TOKENS, "return_token_ids": True}
    answer = client.post("/v1/completions", json=body).json()
    assert [c["token_ids"] for c in answer["choices"]] == expected
    back = client.post("/detokenize", json={"tokens": ids[3]}).json()["prompt"]
    assert back == PROMPTS[3]

"""What the server says of its tokenizer is what the checkpoint's own says, and clients can prepare prompts with it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from inferplane.engine.request.text import Tokenizer
from inferplane.serving.errors import ApiError
from inferplane.serving.http import text
from inferplane.serving.model import ServedModel
from inferplane.serving.settings import ServerSettings
from tests.serving.faults import DEMO


def test_it_says_what_the_checkpoint_says(client):
    info = client.get("/tokenizer_info").raise_for_status().json()
    own = Tokenizer(DEMO).fast
    assert (info["bos_token"], info["eos_token"], info["pad_token"]) == (own.bos_token, own.eos_token, own.pad_token)
    assert (info["chat_template"], info["unk_token"]) == (own.chat_template, None)
    assert info["model_max_length"] == client.get("/v1/models").json()["data"][0]["max_model_len"]
    sent = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert client.post("/tokenize", json=sent).json()["tokens"] == [own.eos_token_id]


def test_a_model_without_a_tokenizer_says_so():
    info = SimpleNamespace(name="x", folder=None, dtype="bfloat16", kv_cache_dtype="auto", device="cpu")
    engine: Any = SimpleNamespace(info=info, tokenizer=None)
    service: Any = SimpleNamespace(ready_model=ServedModel(engine, ServerSettings()))
    (route,) = [route for route in text.routes(service).routes if getattr(route, "path", "") == "/tokenizer_info"]
    endpoint: Any = route
    with pytest.raises(ApiError, match="no tokenizer") as refused:
        asyncio.run(endpoint.endpoint())
    assert refused.value.status == 400

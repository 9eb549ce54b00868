"""Cached prefixes are shared only among requests with the same key, over every protocol."""

from __future__ import annotations

import json

import grpc
import httpx

from tests.serving.live import Live
from tests.serving.test_grpc import PROMPT, address, call, raw, string

HITS = "inferplane:prefix_cache_hits_total"


def test_one_key_cannot_feel_out_what_another_has_sent():
    prompt = PROMPT * 40
    with (
        Live("--grpc-port", "0", "--api-key", "mine", "--api-key", "other") as live,
        grpc.insecure_channel(address(live)) as channel,
        live.client() as client,
    ):

        def by_grpc(key: str) -> float:
            fields = raw(("text_input", "BYTES", [1], string(prompt.encode())), parameters={})
            call(channel, "ModelInfer", metadata=[("authorization", f"Bearer {key}")], **fields)
            return live.metrics()[HITS]

        client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).raise_for_status()
        assert live.metrics()[HITS] == 0
        assert by_grpc("other") == 0
        mine = by_grpc("mine")
        assert mine > 0
        assert by_grpc("other") > mine  # its own, by now
        assert live.stop() == 0


def test_an_id_that_one_key_uses_is_free_for_another():
    body = {"text": "x = [", "req_id": "same", "max_dec_len": 1500, "min_dec_len": 1500, "stream": True}
    with Live("--api-key", "mine", "--api-key", "other") as live, live.client() as client:
        with client.stream("POST", "/v1/completions", json=body) as first:
            lines = first.iter_lines()
            assert json.loads(next(lines))["req_id"] == "same"
            short = {**body, "max_dec_len": 2, "min_dec_len": 1, "stream": False}
            for key, status in (("mine", 409), ("other", 200)):
                headers = {"authorization": f"Bearer {key}"}
                with httpx.Client(base_url=live.url, timeout=60, headers=headers) as another:
                    assert another.post("/v1/completions", json=short).status_code == status
        assert live.stop() == 0

"""schemathesis against the server's OpenAPI description: valid and invalid data, boundaries, null bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.serving.live import Live, engine_pids

EXAMPLES = 50
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "ignored_auth",
)
"""All but positive_data_acceptance: what a schema can say is not all (a prompt may be too long for the model)."""


INFER = """
[[operations]]
include-name = "POST /v2/models/{model}/infer"
parameters = { "path.model" = "demo" }
"""
"""Without a model that is there, no body would be looked at."""


def test_every_operation_keeps_to_its_description(tmp_path):
    (tmp_path / "schemathesis.toml").write_text(INFER)
    with Live("--max-output-tokens", "4", "--max-num-seqs", "16", "--api-key", "k") as server:
        engine = engine_pids(server)
        command = [str(Path(sys.executable).with_name("st")), "run", f"{server.url}/openapi.json"]
        command += ["--header", "Authorization: Bearer k", "--checks", ",".join(CHECKS), "--mode", "all"]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", "1"]
        command += ["--generation-deterministic", "--generation-allow-x00", "true"]
        command += ["--continue-on-failure", "--no-shrink", "--request-timeout", "60", "--no-color"]
        command += ["--suppress-health-check", "all"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout[-12000:] + done.stderr[-3000:]
        assert set(engine) <= set(engine_pids(server)), "the engine was started again"
        server.at_rest()
        assert server.stop() == 0


def document(*args: str) -> dict[str, Any]:
    with Live(*args) as server, server.client() as client:
        return dict(client.get("/openapi.json").json())


def test_a_key_is_demanded_where_one_is_set():
    for args, needed in (((), False), (("--api-key", "k"), True)):
        found = document(*args)
        assert ("securitySchemes" in found["components"]) == needed
        for path, operations in found["paths"].items():
            for operation in operations.values():
                assert ("security" in operation) == (needed and "health" not in path), path


@pytest.mark.parametrize(
    ("path", "body", "valid"),
    [
        ("/v1/chat/completions", {"messages": None}, False),
        ("/v1/chat/completions", {}, False),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, False),
        ("/v1/chat/completions", {"messages": None, "req_id": "a"}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, True),
        ("/v1/chat/completions", {"messages": [{"content": "x"}], "req_id": "a"}, True),
        ("/v1/chat/completions", {"text": "x", "messages": None}, True),
        ("/v1/completions", {"prompt": None}, False),
        ("/v1/completions", {"text": None}, False),
        ("/v1/completions", {"input_ids": None}, False),
        ("/v1/completions", {"prompt": "x"}, True),
        ("/tokenize", {}, False),
        ("/tokenize", {"prompt": None}, False),
        ("/tokenize", {"messages": None, "prompt": None}, False),
        ("/tokenize", {"prompt": "x"}, True),
        ("/v1/embeddings", {"input": None}, False),
    ],
)
def test_a_body_without_a_prompt_is_not_described_as_valid(client, path, body, valid):
    found = client.get("/openapi.json").json()
    schema = found["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    check = jsonschema.Draft202012Validator({**schema, "components": found["components"]})
    assert check.is_valid(body) == valid
    answer = client.post(path, json={"max_tokens": 1, **body} if "embed" not in path else body)
    assert (answer.status_code == 200) == valid, answer.text

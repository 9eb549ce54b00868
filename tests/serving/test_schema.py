"""schemathesis against the server's OpenAPI description: valid and invalid data, boundaries, null bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_every_operation_keeps_to_its_description(tmp_path):
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

"""`inferplane bench serve` against the real server: endpoints, counts held against the server's own, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from inferplane.cli import main
from tests.serving.live import Live
from tests.serving.test_access import certificate

KEY = "secret-of-the-bench"
SMALL = ("--requests", "12", "--concurrency", "3", "--input-len", "10-20", "--output-len", "4-9", "--warmup", "1")
LENGTHS = range(4, 10)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with Live("--max-num-seqs", "4", "--max-waiting", "4", "--grpc-port", "0", "--api-key", KEY) as live:
        yield live
        assert live.process.poll() is None, live.text[-3000:]
        live.at_rest()
        assert live.stop() == 0


@pytest.fixture
def bench(capsys, monkeypatch):
    """Runs the verb here; returns its exit code, its figures and what it wrote to standard error."""
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    monkeypatch.setenv("INFERPLANE_API_KEY", KEY)

    def run(*words: str) -> tuple[int, dict, str]:
        code = main.main(["bench", "serve", "--json", *words])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else {}, err

    return run


def address_of_grpc(server: Live) -> str:
    return server.event("listening")["grpc"].rpartition(":")[2]


def url_of(server: Live, endpoint: str) -> str:
    return f"grpc://{server.event('listening')['grpc']}" if endpoint == "grpc" else server.url


@pytest.mark.parametrize("endpoint", ["chat", "completions", "native", "grpc"])
def test_every_endpoint_counts_as_the_server_does(endpoint, server, bench):
    before = server.metrics()
    code, facts, err = bench("--url", url_of(server, endpoint), "--endpoint", endpoint, "--ignore-eos", *SMALL)
    after = server.at_rest()
    assert code == 0, err
    (level,) = facts["levels"]
    assert level["counts"]["ended"] == 12 == level["counts"]["sent"] and level["tokens"]["counted_by"] == {"usage": 12}
    assert all(r["output_tokens"] == r["requested_tokens"] for r in level["requests"])
    assert {r["requested_tokens"] for r in level["requests"]} <= set(LENGTHS)

    def grown(name: str) -> float:
        return after[f"inferplane:{name}"] - before.get(f"inferplane:{name}", 0)

    # The warm-up is one request, whose lengths are within the same limits.
    generated, prompts = grown("generation_tokens_total"), grown("prompt_tokens_total")
    assert generated - level["tokens"]["output"] in LENGTHS and 10 <= prompts - level["tokens"]["prompt"] <= 200
    for one in level["requests"]:
        assert 0 < one["ttft_s"] <= one["e2e_s"] <= one["finished_s"] - one["sent_s"] + 1e-6


@pytest.mark.parametrize("endpoint", ["chat", "grpc"])
def test_refusals_are_counted_as_refusals(endpoint, server, bench):
    words = ("--requests", "60", "--concurrency", "30", "--input-len", "5", "--output-len", "200", "--ignore-eos")
    code, facts, err = bench("--url", url_of(server, endpoint), *words)
    counts = facts["levels"][0]["counts"]
    assert code == 0, err
    assert counts["sent"] == 60 and counts["failures"]["refused"] > 0 and counts["ended"] >= 8
    assert counts["ended"] + counts["failures"]["refused"] == 60
    server.at_rest()


@pytest.mark.parametrize("endpoint", ["chat", "native", "grpc"])
def test_conversations(endpoint, server, bench):
    words = (
        "--conversation-len",
        "3",
        "--requests",
        "6",
        "--concurrency",
        "1",
        "--output-len",
        "5",
        "--input-len",
        "6",
    )
    code, facts, err = bench("--url", url_of(server, endpoint), "--endpoint", endpoint, "--ignore-eos", *words)
    assert code == 0, err
    requests = facts["levels"][0]["requests"]
    prompts = [one["prompt_tokens"] for one in requests]
    assert prompts[0] < prompts[1] < prompts[2] > prompts[3] < prompts[4] < prompts[5]


def test_token_ids_reach_completions(server, bench, tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text(json.dumps({"prompt": [5, 6, 7, 8], "output_len": 3}) + "\n")
    words = ("--dataset", str(path), "--requests", "2", "--endpoint", "completions", "--ignore-eos")
    code, facts, err = bench("--url", server.url, *words)
    assert code == 0 and {r["prompt_tokens"] for r in facts["levels"][0]["requests"]} == {4}, err


def test_a_wrong_key_and_a_model_that_is_not_served(server, bench):
    for endpoint in ("chat", "grpc"):
        code, _, err = bench("--url", url_of(server, endpoint), "--api-key", "wrong", "--requests", "1")
        error = json.loads(err.splitlines()[-1])["error"]
        assert code in (1, 2) and "The key is missing or wrong" in error["what"] and "--api-key" in error["remedy"]
    code, _, err = bench("--url", server.url, "--model", "nowhere", "--requests", "1")
    error = json.loads(err.splitlines()[-1])["error"]
    assert code == 1 and "404" in error["what"] and "--model" in error["remedy"]
    assert KEY not in err


def test_grpc_to_a_port_where_nothing_listens(bench):
    code, _, err = bench("--url", "grpc://127.0.0.1:9", "--requests", "1")
    assert code == 1 and "UNAVAILABLE" in err


def test_tls_with_a_certificate_that_is_trusted_and_one_that_is_not(bench, monkeypatch, tmp_path):
    certificate(tmp_path)
    files = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"), "--grpc-port", "0")
    with Live(*files, "--api-key", KEY) as server:
        url, grpc_url = f"https://localhost:{server.port}", f"grpcs://localhost:{address_of_grpc(server)}"
        code, _, err = bench("--url", url, "--requests", "1")
        error = json.loads(err.splitlines()[-1])["error"]
        assert code == 1 and "certificate is not valid" in error["what"] and "SSL_CERT_FILE" in error["remedy"]
        code, facts, err = bench("--url", url, "--requests", "2", "--output-len", "3", "--insecure")
        assert code == 0 and facts["levels"][0]["counts"]["ended"] == 2, err
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        for trusted in (url, grpc_url):
            code, facts, err = bench("--url", trusted, "--requests", "2", "--output-len", "3")
            assert code == 0 and facts["levels"][0]["counts"]["ended"] == 2, err
        code, _, err = bench("--url", url.replace("https", "http"), "--requests", "1")
        assert code == 1 and "https://" in json.loads(err.splitlines()[-1])["error"]["remedy"]
        assert server.stop() == 0

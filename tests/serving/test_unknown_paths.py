"""An unknown path, or a method that a path has not, is answered with what there is."""

from __future__ import annotations

import httpx
import pytest

from tests.serving.live import Live


@pytest.fixture(scope="module")
def live():
    server = Live("--metrics-port", "0", "--health-port", "0")
    yield server
    server.stop()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("POST", "/"),
        ("GET", "/v1"),
        ("POST", "/chat/completions"),
        ("GET", "/docs"),
        ("GET", "/" + "x" * 500),
    ],
)
def test_an_unknown_path_is_told_what_there_is(live, method, path):
    answer = httpx.request(method, live.url + path, json={} if method == "POST" else None)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (404, "not_found_error", "http_error")
    assert error["message"].startswith(f"There is no {method} {path[:100]}. There is: ")
    for route in (
        "POST /v1/completions",
        "POST /v1/chat/completions",
        "GET /v1/models",
        "POST /v2/models/{model:path}/infer",
        "GET /health",
        "GET /status",
    ):
        assert route in error["message"]
    assert error["message"].endswith("docs/serving.md says what each does.")


@pytest.mark.parametrize(
    ("method", "path", "has"),
    [("GET", "/v1/completions", "POST"), ("DELETE", "/v1/models", "GET"), ("PUT", "/tokenize", "POST")],
)
def test_an_unknown_method_is_told_which_there_are(live, method, path, has):
    answer = httpx.request(method, live.url + path)
    assert answer.status_code == 405 and answer.headers["allow"] == has
    assert answer.json()["error"]["message"] == f"{path} has no {method}; it has {has}."


@pytest.mark.parametrize(
    ("port", "has", "lacks"), [("health", "/v2/health/live", "/v1"), ("metrics", "/metrics", "/v1")]
)
def test_other_ports_name_their_own_paths(live, port, has, lacks):
    message = httpx.get(f"http://{live.host}:{live.ports[port]}/").json()["error"]["message"]
    assert f"GET {has}" in message and lacks not in message

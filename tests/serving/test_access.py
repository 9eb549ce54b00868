"""Keys: every route, every spelling, every wrong key; only health is open."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address

import httpx
import pytest

from inferplane.errors import UsageError
from inferplane.serving.http.app import full_app
from inferplane.serving.http.gate import OPEN
from inferplane.serving.keys import read_keys
from inferplane.serving.service import Service
from inferplane.serving.settings import ServerSettings
from tests.serving.live import Live
from tests.serving.test_raw_socket import status, talk
from tests.serving.test_workers import all_ready, workers

KEY = "s3cret-é"
WRONG = {
    "no header": b"",
    "empty": b"Authorization: \r\n",
    "scheme alone": b"Authorization: Bearer\r\n",
    "empty key": b"Authorization: Bearer \r\n",
    "another key": b"Authorization: Bearer other\r\n",
    "a beginning": b"Authorization: Bearer s3cret\r\n",
    "another scheme": b"Authorization: Basic " + KEY.encode() + b"\r\n",
    "no scheme": b"Authorization: " + KEY.encode() + b"\r\n",
    "twice": b"Authorization: Bearer " + KEY.encode() + b"\r\nAuthorization: Bearer x\r\n",
    "in other headers": b"X-Api-Key: " + KEY.encode() + b"\r\nCookie: key=" + KEY.encode() + b"\r\n",
}
RIGHT = b"Authorization: Bearer " + KEY.encode() + b"\r\n"


def spellings(path: str) -> list[str]:
    """Other ways to write a path, that some part of a server might take for it."""
    head, _, tail = path[1:].partition("/")
    escaped = f"/%{ord(path[1]):02x}{path[2:]}"
    more = [
        f"//{path[1:]}",
        f"/.{path}",
        f"/x/..{path}",
        f"{path}/",
        f"{path}?key=1",
        f"{path}%2f",
        f"{path};x",
        escaped,
    ]
    more += [f"/health/..{path}", f"/health/..%2f{path[1:]}", f"/health%00{path}", f"/health?{path}", path.upper()]
    return [path, *more, f"/{head}%2f{tail}", f"/{head}\\{tail}", f"http://x{path}", f"{path}#/health"]


@pytest.fixture(scope="module")
def locked():
    with Live("--api-key", KEY, "--max-num-seqs", "4") as server:
        yield server
        assert server.stop() == 0
        assert "s3cret" not in server.text


@pytest.fixture(scope="module")
def paths() -> list[str]:
    import asyncio

    async def routes() -> list[str]:
        found = {r.path.replace("{model:path}", "demo") for r in full_app(Service(ServerSettings())).routes}
        return sorted({path.replace("{version}", "1") for path in found})

    return asyncio.run(routes())


def test_the_routes_are_the_ones_we_know(paths):
    assert {"/v1/completions", "/v1/chat/completions", "/metrics", "/openapi.json", "/tokenize", "/version"} <= set(
        paths
    )
    assert set(paths) >= OPEN


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS"])
def test_no_route_is_open_but_health(locked, paths, method):
    opened = []
    for path in paths:
        for spelled in spellings(path):
            answer = talk(locked, request(method, spelled, b""))
            plain = spelled.split("?")[0].removeprefix("http://x")  # an absolute target is its path (RFC 9112, 3.2.2)
            if plain in OPEN and method in ("GET", "HEAD"):
                assert status(answer) == 200, (spelled, answer)
            elif plain in OPEN:
                assert status(answer) == 405, (spelled, answer)
            elif status(answer) not in (401, 400, 0):
                opened.append((spelled, answer[:60]))
    assert not opened


def request(method: str, path: str, header: bytes) -> bytes:
    body = b"{}" if method == "POST" else b""
    type_ = b"Content-Type: application/json\r\nContent-Length: 2\r\n" if body else b""
    start = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n".encode()
    return start + type_ + header + b"\r\n" + body


@pytest.mark.parametrize("name", WRONG)
def test_wrong_keys(locked, paths, name):
    for path in sorted(set(paths) - OPEN):
        answer = talk(locked, request("GET", path, WRONG[name]))
        assert status(answer) == 401, (path, answer)
        assert b'"invalid_api_key"' in answer
        assert b"www-authenticate: " in answer.lower()


def test_the_right_key(locked, paths):
    for path in paths:
        assert status(talk(locked, request("GET", path, RIGHT))) in (200, 405), path
    assert status(talk(locked, request("GET", "/nowhere", RIGHT))) == 404
    assert status(talk(locked, request("GET", "/nowhere", b""))) == 401


def test_a_large_body_needs_a_key_first(locked):
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n"
    )
    assert status(talk(locked, head)) == 401  # before a byte of the body was read


# ---------------------------------------------------------------- other ports, other processes


class Port:
    """A port of a live server, for `talk`."""

    def __init__(self, server: Live, number: int) -> None:
        self._address = server.host, number

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self._address, timeout=30)
        sock.settimeout(30)
        return sock


@pytest.fixture(scope="module")
def apart():
    ports = ("--health-port", "0", "--metrics-port", "0", "--http-workers", "2")
    with Live(*ports, "--api-key", KEY, "--max-num-seqs", "4") as server:
        all_ready(server, 2)
        yield server
        assert server.stop() == 0
        assert "s3cret" not in server.text


def matrix(port: Port, paths: list[str], there: set[str]) -> None:
    """Every route x no, a wrong and the right key x spellings: without the right one only health is open.

    Args:
        port: where to ask.
        paths: of all routes of the server.
        there: those that this port has.
    """
    for path in paths:
        for spelled in spellings(path):
            plain = spelled.split("?")[0].removeprefix("http://x")
            for method, header in (("GET", b""), ("POST", b""), ("GET", WRONG["another key"])):
                found = status(talk(port, request(method, spelled, header)))
                if plain in OPEN:
                    assert found == (200 if method == "GET" else 405), (method, spelled, header)
                else:
                    assert found in (401, 400, 0), (method, spelled, header)
        found = status(talk(port, request("GET", path, RIGHT)))
        assert found in ((200, 405) if path in there else (404,)), path


def test_ports_of_their_own(apart, paths):
    for name, there in (("health", {*OPEN}), ("metrics", {*OPEN, "/metrics"})):
        port = Port(apart, apart.ports[name])
        matrix(port, paths, {*there, "/openapi.json"})
        for wrong in WRONG.values():
            assert status(talk(port, request("GET", "/metrics", wrong))) == 401


@pytest.mark.parametrize("who", ["first", "worker"])
def test_each_process(apart, paths, who):
    """While one of them is stopped, the other takes every connection."""
    pid = workers(apart)[0] if who == "first" else apart.process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        matrix(Port(apart, apart.port), paths, set(paths))
    finally:
        os.kill(pid, signal.SIGCONT)


# ---------------------------------------------------------------- other ways in


def test_key_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text("one\n\n two \n")
    assert read_keys(ServerSettings(api_key=("zero",), api_key_file=str(path))) == ["zero", "one", "two"]
    path.write_text("\n")
    for name in (path, tmp_path / "missing", tmp_path):
        with pytest.raises(UsageError):
            read_keys(ServerSettings(api_key_file=str(name)))


def test_tls_and_origins_and_more_ports(tmp_path):
    certificate(tmp_path)
    files = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    ports = ("--health-port", "0", "--metrics-port", "0")
    with Live(*files, *ports, "--cors-origins", "https://good.example", "--api-key", "k", wait=False) as server:
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        context.check_hostname = False
        with httpx.Client(base_url=server.url, verify=context, timeout=30) as client:
            assert client.get("/v2/health/live").status_code == 200
            asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
            for origin, allowed in (("https://good.example", True), ("https://evil.example", False)):
                answer = client.options("/v1/completions", headers={"origin": origin, **asks})
                assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
            health = f"https://127.0.0.1:{server.ports['health']}"
            metrics = f"https://127.0.0.1:{server.ports['metrics']}"
            key = {"authorization": "Bearer k"}
            assert client.get(f"{health}/v2/health/live").status_code == 200
            assert client.get(f"{health}/v1/models", headers=key).status_code == 404
            assert client.get(f"{metrics}/metrics").status_code == 401
            assert "inference_server_metrics" in client.get(f"{metrics}/metrics", headers=key).text
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/health", timeout=10)


def test_no_origin_is_welcome_by_default(server):
    with server.client() as client:
        answer = client.get("/health", headers={"origin": "https://any.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]


def certificate(folder) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))]
    now = datetime.now(timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(key.private_bytes(*form))


@pytest.mark.parametrize("path", ["/health", "/v2/health/live", "/v1/models", "/metrics", "/version", "/status"])
def test_head_is_answered_as_get_is_without_a_body(server, path):
    with server.client() as client:
        whole, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (whole.status_code, b"") == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        assert client.head("/v1/completions").status_code == 405
        assert client.get("/version").status_code == 200  # the connection is in step

"""A local server that speaks the hub's protocol, and fails on request; beside it a second host with the large files.

Written from the protocol as https://huggingface.co/docs/hub/api and huggingface_hub describe it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret_of_the_test"


@dataclass
class Fault:
    """What one request gets in place of its answer.

    Args:
        status: the answer's status, with `headers`; 0: the file.
        headers: of the answer.
        send: bytes of the file that are sent before the connection ends; None: all.
        stall: after these bytes wait for the server's end, instead of ending the connection.
        flip: another first byte.
        whole: no attention to Range.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    send: int | None = None
    stall: bool = False
    flip: bool = False
    whole: bool = False


@dataclass
class Model:
    """A repository with one commit per revision."""

    files: dict[str, bytes]
    commit: str = "a" * 40
    large: tuple[str, ...] = (".safetensors", ".bin", ".gguf")
    private: bool = False
    gated: bool = False

    def blob_id(self, name: str) -> str:
        content = self.files[name]
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def sha256(self, name: str) -> str:
        return hashlib.sha256(self.files[name]).hexdigest()

    def is_large(self, name: str) -> bool:
        return name.endswith(self.large)

    def info(self) -> dict[str, Any]:
        siblings = []
        for name, content in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": self.blob_id(name)}
            if self.is_large(name):
                entry["lfs"] = {"sha256": self.sha256(name), "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        card = {"license": "apache-2.0"}
        return {"sha": self.commit, "siblings": siblings, "cardData": card, "gated": "auto" if self.gated else False}


class HubServer:
    """The hub and its file host, each on a port of its own."""

    def __init__(self) -> None:
        self.models: dict[tuple[str, str], Model] = {}
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        """End of a path -> what its next requests get."""
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        """"hub" or "files", the path, and the headers of each request."""
        self.stopping = threading.Event()
        self.stalled = threading.Event()
        self.hub = self._start("hub")
        self.host = self._start("files")
        self.endpoint = f"http://127.0.0.1:{self.hub.server_port}"

    def add(self, repository: str, model: Model, revision: str = "main") -> Model:
        self.models[repository, revision] = self.models[repository, model.commit] = model
        return model

    def paths(self, kind: str = "files") -> list[str]:
        return [path for where, path, _ in self.requests if where == kind]

    def ranges(self) -> list[str | None]:
        return [headers.get("range") for where, _, headers in self.requests if where == "files"]

    def _start(self, kind: str) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self, "kind": kind}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def stop(self) -> None:
        self.stopping.set()
        for server in (self.hub, self.host):
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    owner: HubServer
    kind: str
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.owner.requests.append((self.kind, path, {key.lower(): value for key, value in self.headers.items()}))
        fault = next((f.pop(0) for end, f in self.owner.faults.items() if f and path.endswith(end)), Fault())
        with contextlib.suppress(ConnectionError):
            if fault.status:
                self.answer(fault.status, dict(fault.headers))
            elif self.kind == "files":
                self.send_file(path.rpartition("/")[2], fault)
            elif found := re.fullmatch(r"/api/models/(.+)/revision/(.+)", path):
                self.send_info(*found.groups())
            elif found := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
                self.resolve(*found.groups(), fault)
            else:
                self.answer(404, {})

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def find(self, repository: str, revision: str) -> Model | None:
        """The model, or None after an answer that refuses it."""
        known = [model for (name, _), model in self.owner.models.items() if name == repository]
        may = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if not known or (known[0].private and not may):
            self.answer(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return None
        model = self.owner.models.get((repository, revision))
        if model is None:
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        return model

    def send_info(self, repository: str, revision: str) -> None:
        if model := self.find(repository, revision):
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(model.info()).encode())

    def resolve(self, repository: str, revision: str, name: str, fault: Fault) -> None:
        model = self.find(repository, revision)
        if model is None:
            return
        if model.gated and self.headers.get("authorization") != f"Bearer {TOKEN}":
            self.answer(403, {"X-Error-Code": "GatedRepo"})
        elif name not in model.files:
            self.answer(404, {"X-Error-Code": "EntryNotFound"})
        elif model.is_large(name):
            digest = model.sha256(name)
            location = f"http://localhost:{self.owner.host.server_port}/blobs/{digest}?Signature=secret"
            linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(model.files[name]))}
            self.answer(302, {"Location": location, "X-Repo-Commit": model.commit, **linked})
        else:
            self.send_bytes(model.files[name], fault, {"ETag": f'"{model.blob_id(name)}"'})

    def send_file(self, digest: str, fault: Fault) -> None:
        models = self.owner.models.values()
        contents = (c for model in models for c in model.files.values() if hashlib.sha256(c).hexdigest() == digest)
        content = next(contents, None)
        if content is None:
            self.answer(404, {})
        else:
            self.send_bytes(content, fault, {})

    def send_bytes(self, content: bytes, fault: Fault, headers: dict[str, str]) -> None:
        start, stop, status = 0, len(content), 200
        if not fault.whole and (found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))):
            start, status = int(found[1]), 206
            stop = min(stop, int(found[2]) + 1) if found[2] else stop
            headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        body = content[start:stop]
        if fault.flip:
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body if fault.send is None else body[: fault.send])
        if fault.stall:
            self.wfile.flush()
            self.owner.stalled.set()
            self.owner.stopping.wait(20)
        if fault.send is not None:
            self.close_connection = True


@contextlib.contextmanager
def serving() -> Iterator[HubServer]:
    """A server while the context lasts."""
    server = HubServer()
    try:
        yield server
    finally:
        server.stop()

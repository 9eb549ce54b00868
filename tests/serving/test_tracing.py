"""Spans of requests: the conventions' names, no text, the caller's span as parent; and a collector that gets them."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import logging
import threading
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from inferplane.errors import UsageError
from inferplane.serving import logs, tracing
from inferplane.serving.grpc import schema
from inferplane.serving.settings import ServerSettings
from inferplane.serving.shared_state.slots import SlotReservation
from tests.serving.faults import CHAT, COMPLETIONS, Small, run
from tests.serving.live import Live
from tests.serving.test_grpc import address, call, raw, string

SECRET = "a_name_nobody_else_has"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NAMES = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}


@pytest.fixture
def spans(tmp_path):
    """What a small server makes of requests, in memory."""

    def of(work: Any) -> list[Any]:
        exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))

        async def inside(server: Small) -> None:
            assert server.service is not None
            server.service.tracer = tracing.Tracer(provider)
            await work(server)
            server.service.tracer = None

        run(tmp_path, inside)
        found = list(exporter.get_finished_spans())
        for span in found:
            assert span.kind is SpanKind.SERVER
            own = {name for name in span.attributes if name.startswith("gen_ai.")}
            assert own <= NAMES
            assert SECRET not in str(dict(span.attributes)) + span.name
        return found

    return of


def test_what_a_span_tells(spans):
    async def work(server: Small) -> None:
        sampling = {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "seed": 7, "ignore_eos": True}
        await server.send(COMPLETIONS, {"prompt": SECRET, "n": 2, "stream": True, "model": "default", **sampling})
        await server.send(CHAT, {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2, "user": SECRET})
        await server.send("/v1/embeddings", {"input": [SECRET, "y"]})
        await server.send(COMPLETIONS, {"text": SECRET, "max_dec_len": 2, "topp": 0.8})

    text, chat, embeddings, native = spans(work)
    model = text.attributes["gen_ai.response.model"]
    assert text.name == "text_completion default" and chat.name == f"chat {model}"
    assert embeddings.name == f"embeddings {model}"
    told = dict(text.attributes)
    assert told.pop("gen_ai.usage.input_tokens") > 0
    assert 0 < told.pop("gen_ai.response.time_to_first_chunk") < 60
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "inferplane",
        "gen_ai.request.model": "default",
        "gen_ai.response.model": model,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }
    assert {s.status.status_code for s in (text, chat, embeddings, native)} == {StatusCode.UNSET}
    assert not [n for n in embeddings.attributes if "output" in n or "temperature" in n or "max_tokens" in n]
    assert native.attributes["gen_ai.request.top_p"] == 0.8
    assert native.parent is None
    assert all(s.end_time > s.start_time for s in (text, chat, embeddings, native))


def test_errors_and_clients_that_leave(spans):
    async def work(server: Small) -> None:
        await server.send(COMPLETIONS, {"prompt": "x", "max_tokens": 10**6})
        long = {"prompt": "x", "max_tokens": 200, "ignore_eos": True}
        leaving = asyncio.ensure_future(server.send(COMPLETIONS, long))
        while not server.service or not server.service._generations:
            await asyncio.sleep(0.001)
        leaving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await leaving

    refused, left = spans(work)
    assert refused.attributes["error.type"] == "context_length_exceeded"
    assert left.attributes["error.type"] == "cancelled"
    assert {refused.status.status_code, left.status.status_code} == {StatusCode.ERROR}


def test_who_is_refused_at_the_door_has_a_span_with_the_status(spans):
    async def work(server: Small) -> None:
        await server.send(COMPLETIONS, {"prompt": 5, "model": SECRET})
        await server.send(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        assert server.service is not None
        held = [SlotReservation(server.service.slots) for _ in range(server.service.slots.max_sequences)]
        await server.send(CHAT, {"messages": [{"role": "user", "content": SECRET}]})
        for place in held:
            place.release()
        await server.send("/v1/none", {})

    malformed, _, full = spans(work)
    for span, route, status, why in (
        (malformed, COMPLETIONS, 400, "invalid_value"),
        (full, CHAT, 429, "queue_full"),
    ):
        assert span.name == f"POST {route}"
        assert span.attributes["http.route"] == route
        assert span.attributes["http.response.status_code"] == status
        assert span.attributes["error.type"] == why
        assert span.status.status_code is StatusCode.ERROR
        assert span.end_time >= span.start_time


def test_calls_that_are_refused_at_the_door_have_a_span_under_the_callers():
    with contextlib.ExitStack() as opened:
        url, told = opened.enter_context(collector())
        live = opened.enter_context(Live("--otlp-endpoint", url, "--grpc-port", "0", "--api-key", "k"))
        right = [("authorization", "Bearer k"), ("traceparent", PARENT)]
        with grpc.insecure_channel(address(live)) as channel:
            wrong = raw(("text_input", "BYTES", [2], string(SECRET.encode())))
            for method, metadata, fields in (
                ("ModelInfer", [("traceparent", PARENT)], wrong),
                ("ModelInfer", right, wrong),
                ("ModelMetadata", right, {"name": "none"}),  # asks for no tokens: it is counted, and has no span
            ):
                with pytest.raises(grpc.RpcError):
                    call(channel, method, metadata=metadata, **fields)
            kind, answered = schema.method_types("ModelStreamInfer")
            (answer,) = channel.stream_stream(
                f"/{schema.SERVICE}/ModelStreamInfer",
                request_serializer=kind.SerializeToString,
                response_deserializer=answered.FromString,
            )(iter([kind(**wrong)]), timeout=60, metadata=right)
            assert answer.error_message
        assert live.stop() == 0
    requests = [request for *_, request in told]
    found = [s for r in requests for x in r.resource_spans for scope in x.scope_spans for s in scope.spans]
    facts = [{a.key: a.value.string_value for a in span.attributes} for span in found]
    assert [(f["rpc.method"], f["rpc.response.status_code"], f["error.type"]) for f in facts] == [
        (f"{schema.SERVICE}/ModelInfer", "UNAUTHENTICATED", "invalid_api_key"),
        (f"{schema.SERVICE}/ModelInfer", "INVALID_ARGUMENT", "invalid_value"),
        (f"{schema.SERVICE}/ModelStreamInfer", "INVALID_ARGUMENT", "invalid_value"),
    ]
    assert [s.name for s in found] == [f["rpc.method"] for f in facts]
    assert {f["rpc.system.name"] for f in facts} == {"grpc"}
    assert {s.parent_span_id.hex() for s in found} == {PARENT.split("-")[2]}
    assert SECRET not in str(told)


def test_the_callers_span_stands_above(spans):
    async def work(server: Small) -> None:
        inner = server.service.admit

        def admit(ask: Any, reserved: Any = None) -> Any:
            assert dict(ask.trace) == {}
            return inner(replace(ask, trace={"traceparent": PARENT}), reserved)

        server.service.admit = admit  # type: ignore[method-assign]
        await server.send(COMPLETIONS, {"prompt": "x", "max_tokens": 1})

    (span,) = spans(work)
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]


def test_only_what_traces_need_is_carried():
    headers = [
        (b"traceparent", PARENT.encode()),
        (b"authorization", b"k"),
        (b"baggage", b"a=b"),
        (b"tracestate", b"x=1"),
    ]
    assert tracing.trace_headers(headers) == {"traceparent": PARENT, "tracestate": "x=1"}


def test_who_asks_for_traces(monkeypatch):
    def wanted(endpoint: str | None = None, **environment: str) -> bool:
        return tracing.is_tracing_enabled(ServerSettings(otlp_endpoint=endpoint), environment)

    there = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}
    assert wanted("http://localhost:4318") and wanted(**there)
    assert not wanted() and not wanted(**there, OTEL_SDK_DISABLED="true")
    assert not wanted(**there, OTEL_TRACES_EXPORTER="none")
    for wrong in (
        "localhost:4318",
        "ftp://x",
        "http://",
        "",
        "http://[::1",
        "http://h:abc",
        "http://h:99999",
        "http://h/?a",
    ):
        with pytest.raises(UsageError, match="otlp_endpoint"):
            wanted(wrong)
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    assert not wanted() and not wanted(**there)  # set for all of a cluster's programs: a warning, and no end of ours
    with pytest.raises(UsageError, match=r"pip install .*\[otel\]"):
        wanted("http://localhost:4318")


@contextlib.contextmanager
def collector():
    """Takes spans as an OpenTelemetry collector does."""
    told: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            told.append((self.path, self.headers.get("content-encoding"), ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *unused: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", told
        server.shutdown()


def test_a_live_server_sends_spans_before_it_ends():
    with contextlib.ExitStack() as opened:
        url, told = opened.enter_context(collector())
        with Live("--otlp-endpoint", url, "--grpc-port", "0") as live, live.client() as client:
            body = {"prompt": SECRET, "max_tokens": 2}
            client.post("/v1/completions", json=body, headers={"traceparent": PARENT}).raise_for_status()
            with grpc.insecure_channel(address(live)) as channel:
                most = ("max_tokens", "INT32", [1], (2).to_bytes(4, "little"))
                fields = raw(("text_input", "BYTES", [1], string(b"x")), most, parameters={})
                call(channel, "ModelInfer", metadata=[("traceparent", PARENT)], **fields)
            assert live.stop() == 0
    assert {path for path, *_ in told} == {"/v1/traces"}
    (resources,) = {str(r.resource) for *_, request in told for r in request.resource_spans}
    assert "inferplane" in resources
    found = [s for *_, request in told for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert [s.name for s in found] == ["text_completion demo"] * 2
    assert {s.trace_id.hex() for s in found} == {PARENT.split("-")[1]}
    assert {s.parent_span_id.hex() for s in found} == {PARENT.split("-")[2]}
    assert SECRET not in str(told)


def test_what_callers_send_as_their_state_is_not_logged(monkeypatch):
    written: list[str] = []
    monkeypatch.setattr("inferplane.serving.logs.Writer.emit", lambda self, record: written.append(record.getMessage()))
    loggers = {name: logging.getLogger(name) for name in logs.LOGGERS}
    before = {name: (x.handlers, x.propagate, x.level) for name, x in loggers.items()}
    try:
        logs.set_up("json", "info")
        TraceContextTextMapPropagator().extract({"traceparent": PARENT, "tracestate": f"z0=\xe9{SECRET}"})
        logging.getLogger("opentelemetry.exporter").warning("heard")
    finally:
        for name, (handlers, propagate, level) in before.items():
            loggers[name].handlers, loggers[name].propagate = handlers, propagate
            loggers[name].setLevel(level)
    assert written == ["heard"]


def test_another_protocol_is_told(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    logging.getLogger("inferplane").propagate = True
    tracer = tracing.start(ServerSettings(otlp_endpoint="http://127.0.0.1:9"))
    assert tracer is not None and "http/protobuf, not by grpc" in caplog.text
    tracer.close()


def test_a_collector_that_is_not_there_costs_the_spans_alone():
    tracer = tracing.start(ServerSettings(otlp_endpoint="http://127.0.0.1:9"))
    assert tracer is not None
    tracer._tracer.start_span("x").end()
    begun = time.monotonic()
    tracer.close()
    assert time.monotonic() - begun < tracing.FLUSH_S + 5

"""OpenTelemetry: a span per request that generates, with the semantic conventions' names for generative models.

Spans contain no text. A request that is refused before it is understood has a span of its route, status and error.

Tracing is enabled by `otlp_endpoint`, or by the standard variables of OpenTelemetry (`OTEL_EXPORTER_OTLP_ENDPOINT`;
others choose the sampler, the service's name, the batches). Otherwise no package of OpenTelemetry is imported.

Source: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from inferplane import __version__
from inferplane.errors import UsageError, install_hint
from inferplane.serving.admission import GenerateCall
from inferplane.serving.errors import ApiError
from inferplane.serving.logs import sanitize
from inferplane.serving.settings import ServerSettings

if TYPE_CHECKING:
    from inferplane.serving.generation import Generation

PROVIDER = "inferplane"
HEADERS = ("traceparent", "tracestate")
"""Headers with which a caller makes a request's span the child of its own."""
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TRACED_PARAMETERS = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
"""Sampling parameters that have a name in the conventions."""
FLUSH_S = 3.0
"""Seconds that an ending server waits for the collector to accept the last spans."""
log = logging.getLogger("inferplane.serving")


class Tracer:
    """Makes the spans.

    Args:
        provider: an OpenTelemetry `TracerProvider`; owned from here on.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider, self._kind = provider, SpanKind.SERVER
        self._tracer = provider.get_tracer(PROVIDER, __version__)
        self._propagator = TraceContextTextMapPropagator()

    @asynccontextmanager
    async def trace_generation(
        self, call: GenerateCall, model_name: str, admitted: AbstractAsyncContextManager[Generation]
    ) -> AsyncIterator[Generation]:
        """Run a request inside a span.

        Args:
            call: the request.
            model_name: the name of the served model.
            admitted: the context in which `Service.admit` runs it.
        """
        name = f"{call.operation} {call.model or model_name}"
        span = self._start_span(name, call_attributes(call, model_name), call.trace)
        failure = ""
        try:
            async with admitted as generation:
                try:
                    yield generation
                finally:
                    span.set_attributes(result_attributes(generation))
        except ApiError as error:
            failure = error.code
            raise
        except BaseException as error:  # a client that leaves cancels its request
            failure = "cancelled" if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else "internal_error"
            raise
        finally:
            if failure:
                _mark_failed(span, failure)
            span.end()

    def trace_refusal(
        self, name: str, attributes: Mapping[str, Any], trace: Mapping[str, str], reason: str, took_s: float
    ) -> None:
        """Make a span of a request that was refused before `trace_generation`.

        Args:
            name: the span's name.
            attributes: the span's attributes.
            trace: headers that name its parent.
            reason: the error's code.
            took_s: seconds since the request's arrival.
        """
        now = time.time_ns()
        span = self._start_span(name, attributes, trace, now - int(took_s * 1e9))
        _mark_failed(span, reason)
        span.end(now)

    def _start_span(
        self, name: str, attributes: Mapping[str, Any], trace: Mapping[str, str], start_ns: int | None = None
    ) -> Any:
        parent = self._propagator.extract(dict(trace))
        return self._tracer.start_span(name, parent, self._kind, dict(attributes), start_time=start_ns)

    def close(self) -> None:
        """Send the remaining spans, if the collector accepts them in time."""
        thread = threading.Thread(target=self._provider.shutdown, name="inferplane-spans", daemon=True)
        thread.start()
        thread.join(FLUSH_S)


def _mark_failed(span: Any, reason: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR))


def call_attributes(call: GenerateCall, model_name: str) -> dict[str, Any]:
    """Return the attributes of a span at its beginning."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": call.model or model_name,
        "gen_ai.response.model": model_name,
    }
    found.update(
        {f"gen_ai.request.{n}": call.sampling[n] for n in TRACED_PARAMETERS if call.sampling.get(n) is not None}
    )
    if call.operation == "embeddings":
        found.pop("gen_ai.request.temperature", None)  # the server's own value, not the client's
    elif call.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = call.max_tokens
    if call.n != 1:
        found["gen_ai.request.choice.count"] = call.n
    return found


def result_attributes(generation: Generation) -> dict[str, Any]:
    """Return the attributes of a span at its end."""
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
    }
    if generation.call.operation != "embeddings":
        found["gen_ai.usage.output_tokens"] = generation.completion_tokens
        found["gen_ai.response.finish_reasons"] = list(generation.finish_reasons)
        if generation.first_token_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = generation.first_token_s
    return found


def trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers of a request that name the parent of its span."""
    return {n.decode(): v.decode("latin-1") for n, v in headers if n.decode("latin-1") in HEADERS}


def _has_packages() -> bool:
    names = ("opentelemetry", "sdk"), ("opentelemetry", "exporter", "otlp", "proto", "http")
    parents = [".".join(name[: i + 1]) for name in names for i in range(len(name))]
    return all(find_spec(parent) is not None for parent in parents)


def is_tracing_enabled(settings: ServerSettings, environment: Mapping[str, str]) -> bool:
    """Return whether spans are made.

    Raises:
        UsageError: the setting enables them, but the package is not installed or the endpoint is invalid.
    """
    endpoint = settings.otlp_endpoint
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    off = off or environment.get("OTEL_TRACES_EXPORTER") == "none"
    if endpoint is None:
        named = next((name for name in VARIABLES if environment.get(name)), None)
        if named is None or off:
            return False
        if not _has_packages():
            log.warning(f"{named} is set, and OpenTelemetry is not installed: there will be no traces")
            return False
        return True
    if not _is_endpoint(endpoint):
        raise UsageError(
            f"otlp_endpoint = {endpoint!r}.",
            there_is="URLs of collectors that take OTLP over HTTP: http://localhost:4318",
        )
    if not _has_packages():
        raise UsageError("otlp_endpoint asks for OpenTelemetry, which is not installed.", remedy=install_hint("otel"))
    return not off


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:  # an invalid port, half an address
        return False


def start(settings: ServerSettings) -> Tracer | None:
    """Return a tracer that sends spans to a collector; None if tracing is not enabled."""
    if not is_tracing_enabled(settings, os.environ):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        log.warning(
            f"traces are sent by http/protobuf, not by {sanitize(protocol)} as OTEL_EXPORTER_OTLP_PROTOCOL says"
        )
    base = settings.otlp_endpoint
    endpoint = base if base is None or urlsplit(base).path.endswith("/v1/traces") else f"{base.rstrip('/')}/v1/traces"
    own = {SERVICE_VERSION: __version__}
    if "OTEL_SERVICE_NAME" not in os.environ:
        own[SERVICE_NAME] = PROVIDER
    provider = TracerProvider(resource=Resource.create(own))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider)

"""OpenTelemetry: a span for each request that generates, with the field's names for what generative models do, without
texts. One that is refused before it is known what it asks for has a span of its route, its status and the error.

Asked for by `otlp_endpoint`, or by the variables that every program with OpenTelemetry knows
(`OTEL_EXPORTER_OTLP_ENDPOINT`; others choose the sampler, the service's name, the batches). Nothing of it is imported
otherwise.

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
from inferplane.errors import UsageError
from inferplane.serving.admission import GenerateCall
from inferplane.serving.errors import ApiError
from inferplane.serving.logs import safe
from inferplane.serving.settings import ServerSettings

if TYPE_CHECKING:
    from inferplane.serving.generation import Generation

PROVIDER = "inferplane"
HEADERS = ("traceparent", "tracestate")
"""What callers send to have a request's span under one of theirs."""
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PASSED = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
"""Sampling parameters that have a name there."""
FLUSH_S = 3.0
"""Seconds that a server waits at its end for a collector to take the last spans."""
log = logging.getLogger("inferplane.serving")


class Tracer:
    """Makes the spans.

    Args:
        provider: an OpenTelemetry `TracerProvider`; owned from here on.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer(PROVIDER, __version__)
        self._propagator = TraceContextTextMapPropagator()

    @asynccontextmanager
    async def follow(
        self, ask: GenerateCall, served: str, admitted: AbstractAsyncContextManager[Generation]
    ) -> AsyncIterator[Generation]:
        """A request under a span.

        Args:
            ask: what was asked.
            served: the model's name.
            admitted: the request, as `Service.admit` yields it.
        """
        from opentelemetry.trace import SpanKind

        span = self._tracer.start_span(
            f"{ask.operation} {ask.model or served}",
            context=self._propagator.extract(dict(ask.trace)),
            kind=SpanKind.SERVER,
            attributes=asked(ask, served),
        )
        failure = ""
        try:
            async with admitted as generation:
                try:
                    yield generation
                finally:
                    span.set_attributes(answered(generation))
        except ApiError as error:
            failure = error.code
            raise
        except BaseException as error:  # a client that leaves cancels its request
            failure = "cancelled" if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else "internal_error"
            raise
        finally:
            if failure:
                _fail(span, failure)
            span.end()

    def refused(self, name: str, told: Mapping[str, Any], trace: Mapping[str, str], why: str, took_s: float) -> None:
        """A span for a request that was refused before `follow`.

        Args:
            name: the span's.
            told: its attributes.
            trace: headers that say under which span it belongs.
            why: the error's code.
            took_s: from its arrival to now.
        """
        from opentelemetry.trace import SpanKind

        now = time.time_ns()
        span = self._tracer.start_span(
            name,
            context=self._propagator.extract(dict(trace)),
            kind=SpanKind.SERVER,
            attributes=dict(told),
            start_time=now - int(took_s * 1e9),
        )
        _fail(span, why)
        span.end(now)

    def close(self) -> None:
        """Send what is left, if the collector takes it in time."""
        thread = threading.Thread(target=self._provider.shutdown, name="inferplane-spans", daemon=True)
        thread.start()
        thread.join(FLUSH_S)


def _fail(span: Any, why: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", why)
    span.set_status(Status(StatusCode.ERROR))


def asked(ask: GenerateCall, served: str) -> dict[str, Any]:
    """What a span tells of a request at its beginning."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": ask.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": ask.model or served,
        "gen_ai.response.model": served,
    }
    found.update({f"gen_ai.request.{n}": ask.sampling[n] for n in PASSED if ask.sampling.get(n) is not None})
    if ask.operation == "embeddings":
        found.pop("gen_ai.request.temperature", None)  # nobody asked for it
    elif ask.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = ask.max_tokens
    if ask.n != 1:
        found["gen_ai.request.choice.count"] = ask.n
    return found


def answered(generation: Generation) -> dict[str, Any]:
    """What a span tells of a request at its end."""
    found: dict[str, Any] = {
        "gen_ai.usage.input_tokens": generation.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": generation.cached_tokens,
    }
    if generation.ask.operation != "embeddings":
        found["gen_ai.usage.output_tokens"] = generation.completion_tokens
        found["gen_ai.response.finish_reasons"] = list(generation.finished)
        if generation.first_token_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = generation.first_token_s
    return found


def carried(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers of a request that say under which span it belongs."""
    return {n.decode(): v.decode("latin-1") for n, v in headers if n.decode("latin-1") in HEADERS}


def _installed() -> bool:
    names = ("opentelemetry", "sdk"), ("opentelemetry", "exporter", "otlp", "proto", "http")
    parents = [".".join(name[: i + 1]) for name in names for i in range(len(name))]
    return all(find_spec(parent) is not None for parent in parents)


def wanted(settings: ServerSettings, environment: Mapping[str, str]) -> bool:
    """Whether spans are to be made.

    Raises:
        UsageError: the setting asks for them, and the package is not installed, or the endpoint is none.
    """
    endpoint = settings.otlp_endpoint
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    off = off or environment.get("OTEL_TRACES_EXPORTER") == "none"
    if endpoint is None:
        named = next((name for name in VARIABLES if environment.get(name)), None)
        if named is None or off:
            return False
        if not _installed():
            log.warning(f"{named} is set, and OpenTelemetry is not installed: there will be no traces")
            return False
        return True
    if not _is_endpoint(endpoint):
        raise UsageError(
            f"otlp_endpoint = {endpoint!r}.",
            there_is="URLs of collectors that take OTLP over HTTP: http://localhost:4318",
        )
    if not _installed():
        raise UsageError(
            "otlp_endpoint asks for OpenTelemetry, which is not installed.", remedy="pip install 'inferplane[otel]'"
        )
    return not off


def _is_endpoint(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and not parts.query
    except ValueError:  # a port that is none, half an address
        return False


def start(settings: ServerSettings) -> Tracer | None:
    """A tracer that sends spans to a collector; None when none is wanted."""
    if not wanted(settings, os.environ):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in (None, "", "http/protobuf"):
        log.warning(f"traces are sent by http/protobuf, not by {safe(protocol)} as OTEL_EXPORTER_OTLP_PROTOCOL says")
    base = settings.otlp_endpoint
    endpoint = base if base is None or urlsplit(base).path.endswith("/v1/traces") else f"{base.rstrip('/')}/v1/traces"
    own = {SERVICE_VERSION: __version__}
    if "OTEL_SERVICE_NAME" not in os.environ:
        own[SERVICE_NAME] = PROVIDER
    provider = TracerProvider(resource=Resource.create(own))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider)

"""A gRPC server over a service: the inference protocol, health, reflection; keys, TLS and limits as over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inferplane.serving.errors import ApiError
from inferplane.serving.grpc import schema
from inferplane.serving.grpc.health import HEALTH, HealthService
from inferplane.serving.grpc.listen import MAX_METADATA_BYTES, bind_port
from inferplane.serving.grpc.servicer import Servicer, metadata_headers, record_refusal, with_statuses
from inferplane.serving.keys import Keys
from inferplane.serving.service import Service
from inferplane.serving.settings import ServerSettings
from inferplane.serving.tracing import trace_headers

OPEN = frozenset(
    (f"/{HEALTH}/Check", f"/{HEALTH}/Watch", f"/{schema.SERVICE}/ServerLive", f"/{schema.SERVICE}/ServerReady")
)
"""Methods that need no key."""


class _KeyCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without a key; every method that is not listed as open needs one."""

    def __init__(self, service: Service, keys: Keys) -> None:
        self._service, self._keys = service, keys

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        if not self._keys or handler_call_details.method in OPEN:
            return await continuation(handler_call_details)
        headers = metadata_headers(handler_call_details.invocation_metadata)
        if self._keys.find(headers) is not None:
            return await continuation(handler_call_details)

        async def refuse(request: Any, context: Any) -> None:
            error = ApiError(401, "The key is missing or wrong.", code="invalid_api_key")
            record_refusal(
                self._service, handler_call_details.method.rpartition("/")[2], error, trace_headers(headers), 0.0
            )
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)

        return grpc.unary_unary_rpc_method_handler(refuse)


async def start_server(service: Service, settings: ServerSettings, keys: Keys, port: int) -> tuple[Any, int]:
    """Start a gRPC server.

    Args:
        service: runs the requests.
        settings: address, limits, TLS.
        keys: which clients may call.
        port: 0 for any free port.

    Returns:
        The running `grpc.aio.Server`, and its port.

    Raises:
        UsageError: the port is taken.
    """
    server = grpc.aio.server(
        interceptors=[_KeyCheck(service, keys)],
        options=[
            ("grpc.max_receive_message_length", settings.max_body_bytes),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.so_reuseport", 0),  # a second server must not share the port unnoticed
            ("grpc.max_concurrent_streams", settings.max_connections),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ],
        maximum_concurrent_rpcs=settings.max_connections,
    )
    server.add_generic_rpc_handlers((_handlers(Servicer(service, keys), service),))
    health_pb2_grpc.add_HealthServicer_to_server(HealthService(service), server)
    schema.POOL.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
    reflection.enable_server_reflection((schema.SERVICE, HEALTH, reflection.SERVICE_NAME), server, schema.POOL)
    bound = bind_port(server, settings, port, "--grpc-port")
    await server.start()
    return server, bound


def _handlers(servicer: Servicer, service: Service) -> Any:
    """Return the handlers of the service's methods; gRPC answers all others with UNIMPLEMENTED."""
    handlers = {}
    for name in schema.METHODS:
        request_type, response_type = schema.method_types(name)
        kind = grpc.stream_stream_rpc_method_handler if name in schema.STREAMS else grpc.unary_unary_rpc_method_handler
        method = getattr(servicer, name)
        handlers[name] = kind(
            method if name in schema.STREAMS else with_statuses(method, request_type, service),
            request_deserializer=bytes,  # messages are counted before they are parsed
            response_serializer=response_type.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(schema.SERVICE, handlers)

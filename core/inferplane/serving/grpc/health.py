"""gRPC's health protocol: on the port of the inference service, and on a port with threads of its own.

Requests share one event loop with the first, so that probes wait while it is held up. On the second they are answered
by threads, also while that loop is stuck, and learn that it is.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inferplane.serving.grpc import schema
from inferplane.serving.grpc.listen import MAX_METADATA_BYTES, bind_port
from inferplane.serving.service import Condition, Service
from inferplane.serving.settings import ServerSettings

HEALTH = "grpc.health.v1.Health"
HEALTH_EVERY_S = 0.5
THREADS, MAX_CALLS, MAX_MESSAGE_BYTES = 4, 64, 4096


class HealthService(health_pb2_grpc.HealthServicer):
    """gRPC's health protocol in the event loop that serves, for the server itself ("") and for the inference service.

    Args:
        service: whose health it is.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Check(self, request: Any, context: Any) -> Any:
        status = _status(request.service, self._service.condition())
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> Any:
        last = None
        while True:
            status = _status(request.service, self._service.condition())
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(HEALTH_EVERY_S)


class OutsideHealthService(health_pb2_grpc.HealthServicer):
    """The same as threads see it, for which an event loop that is stuck counts. `Watch` would hold a thread for each
    client, and is UNIMPLEMENTED.

    Args:
        service: whose health it is.
    """

    def __init__(self, service: Service) -> None:
        self._service = service

    def Check(self, request: Any, context: Any) -> Any:
        condition = self._service.condition_outside()
        status = _status(request.service, condition)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:100]!r}")
        return health_pb2.HealthCheckResponse(status=status)


def _status(name: str, condition: Condition) -> Any:
    kinds = health_pb2.HealthCheckResponse
    if name not in ("", schema.SERVICE):
        return kinds.SERVICE_UNKNOWN
    return kinds.SERVING if condition.ready else kinds.NOT_SERVING


def start_health_server(service: Service, settings: ServerSettings, port: int) -> tuple[Any, int]:
    """Start a gRPC server with threads of its own for health, `ServerLive` and `ServerReady`.

    Args:
        service: whose health it is.
        settings: address and TLS.
        port: 0 for any free port.

    Returns:
        The running `grpc.Server`, and its port.

    Raises:
        UsageError: the port is taken.
    """
    server = grpc.server(
        ThreadPoolExecutor(THREADS, thread_name_prefix="inferplane-grpc-health"),
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", MAX_CALLS),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    health_pb2_grpc.add_HealthServicer_to_server(OutsideHealthService(service), server)
    server.add_generic_rpc_handlers((_server_handlers(service),))
    bound = bind_port(server, settings, port, "--grpc-health-port")
    server.start()
    return server, bound


def _server_handlers(service: Service) -> Any:
    """Return the handlers of the inference service's own questions of health."""
    kinds = {name: schema.method_types(name) for name in ("ServerLive", "ServerReady")}

    def live(request: Any, context: Any) -> Any:
        return kinds["ServerLive"][1](live=service.condition_outside().live)

    def ready(request: Any, context: Any) -> Any:
        return kinds["ServerReady"][1](ready=service.condition_outside().ready)

    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            answer, request_deserializer=bytes, response_serializer=kinds[name][1].SerializeToString
        )
        for name, answer in (("ServerLive", live), ("ServerReady", ready))
    }
    return grpc.method_handlers_generic_handler(schema.SERVICE, handlers)

"""An engine in a process of its own: typed messages over a Unix socket, never pickle."""

from inferplane.engine.clients.process.remote import RemoteEngine

__all__ = ["RemoteEngine"]

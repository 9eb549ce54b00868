"""Tells the program that started the server that it is ready, by systemd's protocol.

The message is a datagram to the socket that NOTIFY_SOCKET names.

Source: sd_notify(3).
"""

from __future__ import annotations

import contextlib
import os
import socket

NOTIFY_SOCKET = "NOTIFY_SOCKET"
READY, FOLLOWS = "READY=1", "STATUS=follows"
"""The server accepts requests; this process is a rank that runs the steps of another one."""


def notify(state: str) -> None:
    """Send a state; does nothing where no program listens."""
    address = os.environ.get(NOTIFY_SOCKET, "")
    if not address or not hasattr(socket, "AF_UNIX"):
        return
    if address.startswith("@"):  # the abstract namespace of Linux
        address = f"\0{address[1:]}"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(state.encode(), address)

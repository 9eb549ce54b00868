"""Clients for `serving.py`, in a process of their own: bare sockets and epoll, as cheap as Python reads. What comes
is kept as it is, and looked at when a stream has ended.

Each line of standard input is a task as JSON, `{"do": NAME, ...}`; its findings go out as one line.
"""

from __future__ import annotations

import json
import resource
import select
import selectors
import socket
import sys
import time

MOST_BYTES = 1 << 16
"""Of one reading: more than a step brings a stream. Allocators fetch much larger pieces from the system each time."""
ENDS = b"0\r\n\r\n"


def prompt(i):
    """A prompt of its own for each stream, so that none is in the cache."""
    return f"def function_{i}(a, b):\n    return "


def request(i, tokens, *more):
    """One streaming completion, as it travels."""
    body = {"prompt": prompt(i), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = [
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join([*head, *more, "", ""]).encode() + data


class Stream:
    """A request on a connection, read to its end: a stream's last chunk, or the end of an error's body."""

    def __init__(self, sock, data):
        self.sock, self.begun, self.took, self.parts = sock, time.monotonic(), None, []
        sock.sendall(data)

    @property
    def answer(self):
        return b"".join(self.parts)

    @property
    def status(self):
        return int(self.parts[0][9:12])

    @property
    def events(self):
        return self.answer.count(b"data: {")

    @property
    def whole(self):
        return self.status == 200 and b"data: [DONE]" in self.answer

    def read(self):
        """Take what is there; whether this was the end."""
        data = self.sock.recv(MOST_BYTES)
        self.parts.append(data)
        tail = data if len(data) >= len(ENDS) else self.answer[-len(ENDS) :]
        if data and not tail.endswith(ENDS) and not (tail.endswith(b"}") and self.status != 200):
            return False
        self.took = time.monotonic() - self.begun
        return True


def read_all(streams):
    """Read streams to their ends."""
    waiting, live = select.epoll(), {s.sock.fileno(): s for s in streams}
    for fd in live:
        waiting.register(fd, select.EPOLLIN)
    while live:
        for fd, _ in waiting.poll(60) or sys.exit("nothing came for a minute"):
            if live[fd].read():
                waiting.unregister(fd)
                del live[fd]
    waiting.close()


def connect(port):
    return socket.create_connection(("127.0.0.1", port))


def streams(port, count, tokens, at, kept={}):  # noqa: B006 -- the connections stay open from task to task
    """Seconds for so many streams together, over connections that are open already."""
    socks = kept.setdefault(port, [])
    socks += [connect(port) for _ in range(count - len(socks))]
    begun = time.monotonic()
    found = [Stream(s, request(at + i, tokens)) for i, s in enumerate(socks[:count])]
    read_all(found)
    assert all(s.whole for s in found), [s.answer[:512] for s in found if not s.whole][:1]
    return {"seconds": time.monotonic() - begun, "events": sum(s.events for s in found)}


def burst(port, count, tokens, at):
    """Every end of a crowd, each on a connection of its own, and how long refusals took from before connecting."""
    found = []
    for i in range(count):
        begun = time.monotonic()
        s = Stream(connect(port), request(at + i, tokens, "Connection: close"))
        s.begun = begun
        found.append(s)
    read_all(found)
    for s in found:
        s.sock.close()
    refused = [s.took for s in found if s.status == 429]
    return {"whole": sum(s.whole for s in found), "refused": len(refused), "refusals_s": refused}


def steady(port, count, tokens, at, seconds):
    """So many clients that each ask again once they are answered; seconds of every request."""
    waiting, took = selectors.DefaultSelector(), []
    end = time.monotonic() + seconds
    for i in range(count):
        s = Stream(connect(port), request(at + i, tokens))
        waiting.register(s.sock, selectors.EVENT_READ, s)
    at, left = at + count, count
    while left:
        for key, _ in waiting.select(60) or sys.exit("nothing came for a minute"):
            if not key.data.read():
                continue
            assert key.data.whole, key.data.answer[:512]
            took.append(key.data.took)
            if time.monotonic() < end:
                waiting.modify(key.fileobj, selectors.EVENT_READ, Stream(key.fileobj, request(at, tokens)))
                at += 1
            else:
                waiting.unregister(key.fileobj)
                key.fileobj.close()
                left -= 1
    return {"took_s": took}


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
HALF = POST + b"Content-Type: application/json\r\nContent-Length: 4096\r\n\r\n{"
HOSTILE = (
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",  # a header that grows by a byte at a time
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 65536,  # one that is too long
    HALF,  # a body that does not come
    bytes(range(256)) * 16,  # no HTTP
    POST + b"Content-Length: -1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    HALF.replace(b"4096", b"20") + b'"prompt": [[[[[[[[[[',  # no JSON
    b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20,  # many at once, answers unread
)


def abuse(port, count, seconds):
    """So many connections that misbehave, each opened again when it is closed, a step every 50 ms each."""
    end, opened, sent = time.monotonic() + seconds, [None] * count, 0
    while time.monotonic() < end:
        for i in range(count):
            try:
                if opened[i] is None:
                    opened[i] = connect(port)
                    opened[i].setblocking(False)
                    opened[i].send(HOSTILE[i % len(HOSTILE)])
                    sent += 1
                else:
                    opened[i].send(b"a")
                    if i % len(HOSTILE) != len(HOSTILE) - 1 and opened[i].recv(65536) == b"":
                        raise ConnectionError
            except BlockingIOError:
                pass
            except OSError:
                if opened[i] is not None:
                    opened[i].close()
                opened[i] = None
        time.sleep(0.05)
    for s in opened:
        if s is not None:
            s.close()
    return {"hostile_requests": sent}


def main():
    tasks = {f.__name__: f for f in (streams, burst, steady, abuse)}
    for line in sys.stdin:
        task = json.loads(line)
        before = resource.getrusage(resource.RUSAGE_SELF)
        found = tasks[task.pop("do")](**task)
        after = resource.getrusage(resource.RUSAGE_SELF)
        found["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

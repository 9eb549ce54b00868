"""What `inferplane bench serve` itself costs: CPU seconds of the client at a pace of events, against a server that does
nothing else than to send them at that pace, in a process of its own.

    python benchmarks/load_client.py
    python benchmarks/load_client.py --streams 1 8 64 --events 1000 --seconds 10 --json

The bar is 5 % of a core at 1,000 events (chunks of a chat) a second, whatever the number of streams. The client is
the command as it is, in a process of its own, whose CPU time the command reports; its start is not in it. Each number
of streams is run `--repeats` times and the median counts: another program on the machine makes each event dearer (it
takes the caches away), and never cheaper.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from statistics import median

BAR = 0.05
TEXT = {"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}
CHUNK = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1764300000, "model": "paced"}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def framed(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**more):
    return framed(f"data: {json.dumps({**CHUNK, **more})}\n\n".encode())


async def answer(reader, writer, pace_s):
    """Answer every request of a connection: a list of models, or a stream of as many events as it may have tokens."""
    loop = asyncio.get_running_loop()
    try:
        while head := (await reader.readuntil(b"\r\n\r\n")).decode():
            if head.startswith("GET"):
                body = json.dumps({"data": [{"id": "paced"}]}).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                continue
            length = next(int(line[15:]) for line in head.lower().splitlines() if line.startswith("content-length:"))
            tokens = json.loads(await reader.readexactly(length))["max_tokens"]
            writer.write(HEAD)
            due = loop.time()
            for _ in range(tokens):
                due += pace_s
                await asyncio.sleep(max(0.0, due - loop.time()))
                writer.write(event(choices=[TEXT]))
            writer.write(event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}]))
            writer.write(event(choices=[], usage={"prompt_tokens": 8, "completion_tokens": tokens}))
            writer.write(framed(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def serve(pace_s):
    server = await asyncio.start_server(lambda r, w: answer(r, w, pace_s), "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def measure(streams, events, seconds):
    """CPU share of one run, and events a second as they were."""
    pace_s = streams / events
    command = [sys.executable, __file__, "--serve", str(pace_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            each = max(1, round(seconds / pace_s))
            words = f"bench serve --url {url} --concurrency {streams} --requests {streams} --output-len {each} --json"
            command = [sys.executable, "-m", "inferplane", *words.split(), "--warmup", "0"]
            level = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["levels"][0]
        finally:
            server.kill()
    assert level["counts"]["ended"] == streams and level["tokens"]["output"] == streams * each, level["counts"]
    return level["client_cpu_share"], level["rates"]["output_tokens"]["value"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=float, metavar="S", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--events", type=int, default=1000, help="a second, of all streams together")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve))
        return
    found = {}
    for streams in args.streams:
        runs = [measure(streams, args.events, args.seconds) for _ in range(args.repeats)]
        shares, paces = zip(*runs)
        found[streams] = {"shares": [round(s, 4) for s in shares], "events_per_s": round(median(paces), 1)}
        found[streams]["share"] = round(median(shares), 4)
    if args.json:
        print(json.dumps(found))
        return
    for streams, one in found.items():
        words = (
            f"{streams:4} streams, {one['events_per_s']:7.1f} events/s: {one['share']:.2%} of a core (bar {BAR:.0%})"
        )
        print(f"{words}   runs {', '.join(f'{s:.2%}' for s in one['shares'])}")


if __name__ == "__main__":
    main()

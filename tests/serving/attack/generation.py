"""Requests that ask for as much as there is, constraints that grow, and gRPC."""

from __future__ import annotations

import json
import socket
import string
import time
from random import Random
from typing import Any

import grpc

from inferplane.serving.grpc import schema
from tests.serving.attack.target import CHAT, CLOSED, COMPLETIONS, EMBEDDINGS, Target
from tests.serving.test_constraint_limits import EVIL

STATUS = {
    "OK": 200,
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "UNIMPLEMENTED": 404,
    "DEADLINE_EXCEEDED": 408,
    "CANCELLED": 408,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
}
"""What HTTP would answer instead of a status of gRPC; every other one is 500."""


def complete_all(target: Target, bodies: list[dict[str, Any]], path: str = COMPLETIONS) -> list[int]:
    return target.ask_at_once(target.post(path, {"prompt": "x = ", "max_tokens": 8, **body}) for body in bodies)


def make_constraint(draw: Random) -> dict[str, Any]:
    """A constraint as nobody has sent it before: a regular expression, a schema or a grammar."""
    word = "".join(draw.choices(string.ascii_lowercase, k=8))
    kind = draw.randrange(3)
    if kind == 0:
        return {"regex": f"{word}[a-z]{{{draw.randint(1, 60)}}}(.*{word[0]}.{{{draw.randint(1, 12)}}}){{4}}"}
    if kind == 1:
        names = {f"{word}{i}": {"enum": [f"{word}{j}" for j in range(draw.randint(1, 60))]} for i in range(8)}
        schema = {"type": "object", "properties": names, "required": list(names)}
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    return {"grammar": f'start: a+\na: "{word}" | "(" a ")" | /[0-9]{{1,{draw.randint(2, 40)}}}/'}


def send_new_constraints(target: Target, draw: Random) -> list[int]:
    return complete_all(target, [make_constraint(draw) for _ in range(6)])


def send_constraints_too_complex(target: Target, draw: Random) -> list[int]:
    salt = draw.randrange(10**9)
    regexes = [f"({salt})?((a{{1,50}}){{1,50}}){{1,50}}", f"{salt}(x+x+)+y" * 100, f"{salt}[a-z]{{1,100000}}"]
    grammars = [f'start: "{salt}"' + "(" * 3000 + '"a"' + ")" * 3000, f'start: e "{salt}"\ne: e e | "a" | e "b" e']
    return complete_all(target, [{"regex": r} for r in regexes] + [{"grammar": g} for g in grammars])


def send_constraints_that_grow(target: Target, draw: Random) -> list[int]:
    return complete_all(target, [{**c, "max_tokens": 60, "seed": draw.randrange(100)} for c in draw.sample(EVIL, 3)])


def send_large_schemas(target: Target, draw: Random) -> list[int]:
    salt = draw.randrange(10**9)
    enum = {"enum": [f"{salt}{i}" for i in range(3000)]}
    items = {"type": "array", "minItems": 10**6, "items": {"type": "string", "maxLength": 10**6}}
    itself = {"$defs": {"a": {"properties": {f"{salt}": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"}
    pattern = {"type": "string", "pattern": f"^(a|aa|{salt})+$"}
    forms = [{"type": "json_object", "schema": s} for s in (enum, items, itself, pattern, {"$ref": f"file:///{salt}"})]
    return complete_all(target, [{"response_format": form} for form in forms])


def send_invalid_constraints(target: Target, draw: Random) -> list[int]:
    salt = draw.randrange(10**9)
    invalid = [{"regex": f"({salt}"}, {"regex": ""}, {"regex": f"(?<={salt})x"}, {"grammar": f"start: {salt}"}]
    other = [{"regex": "x" * 5000}, {"grammar": "x" * 70_000}, {"guided_json": {}}, {"regex": "a", "grammar": "b"}]
    return complete_all(target, invalid + other)


def ask_for_many_sequences(target: Target, draw: Random) -> list[int]:
    bodies = [{"n": n, "max_tokens": 4} for n in (8, 64, 65, 128, 10**6, 0, -1)]
    return complete_all(target, [*bodies, {"best_of": 64}, {"n": 64, "prompt": ["x"] * 64}])


def ask_for_many_logprobs(target: Target, draw: Random) -> list[int]:
    bodies = [{"logprobs": k, "max_tokens": 32} for k in (5, 20, 21, 10**6, -1)]
    chat = [{"logprobs": True, "top_logprobs": k} for k in (20, 21, 10**9)]
    say = [{"messages": [{"role": "user", "content": "x"}], "max_tokens": 32, **c} for c in chat]
    return complete_all(target, bodies) + target.ask_at_once(target.post(CHAT, s) for s in say)


def ask_for_many_tokens(target: Target, draw: Random) -> list[int]:
    bodies = [{"max_tokens": n, "ignore_eos": True} for n in (600, 2047, 10**6, 2**31, 2**63, 0, -1)]
    return complete_all(target, [*bodies, {"min_tokens": 10**6}, {"min_tokens": 100, "max_tokens": 8}])


def echo_long_prompts(target: Target, draw: Random) -> list[int]:
    prompts = [[draw.randrange(4, 4000) for _ in range(1900)] for _ in range(4)]
    return complete_all(target, [{"prompt": p, "echo": True, "logprobs": 5, "max_tokens": 1} for p in prompts])


def fill_cache(target: Target, draw: Random) -> list[int]:
    """Long prompts that are all different, so that each drives others' out of the cache."""
    prompts = [[draw.randrange(4, 4000) for _ in range(1500)] for _ in range(6)]
    return complete_all(target, [{"prompt": p, "max_tokens": 1} for p in prompts])


def queue_requests(target: Target, draw: Random) -> list[int]:
    """More than there are places."""
    return complete_all(target, [{"max_tokens": 16, "ignore_eos": True, "seed": i} for i in range(80)])


def set_short_timeouts(target: Target, draw: Random) -> list[int]:
    bodies = [{"timeout": t, "max_tokens": 400, "ignore_eos": True} for t in (0.001, 0.01, 0.1, 0, -1, 1e-300)]
    return complete_all(target, bodies)


def repeat_request_ids(target: Target, draw: Random) -> list[int]:
    body = {"text": "x", "max_dec_len": 16, "min_dec_len": 16, "req_id": str(draw.randrange(100))}
    return target.ask_at_once([target.post(COMPLETIONS, body, b"X-Request-Id: same\r\n")] * 8)


def send_native_requests(target: Target, draw: Random) -> list[int]:
    """The native dialect, with fields as they should not be."""
    bodies: tuple[dict[str, Any], ...] = (
        {"input_ids": [-1]},
        {"input_ids": [[5] * 100] * 100},
        {"input_ids": [10**9]},
        {"text": "x", "max_dec_len": 10**9},
        {"text": "x", "topp": 7},
        {"text": "x", "req_id": "x" * 10**5},
        {"text": "x", "eos_token_ids": [5] * 17},
        {"text": "x", "seq_len": 10**9, "response_type": "\u202e"},
        {"text": "x", "prompt": "x"},
        {"text": "x" * 10**6},
    )
    return target.ask_at_once(target.post(draw.choice((COMPLETIONS, CHAT)), b) for b in bodies)


def mix_embeddings(target: Target, draw: Random) -> list[int]:
    bodies: tuple[dict[str, Any], ...] = (
        {"input": [[5] * 2047] * 8},
        {"input": ["x"] * 65},
        {"input": [[5] * 3000]},
        {"input": ""},
        {"input": "x", "dimensions": 10**9},
        {"input": "x", "encoding_format": "x" * 10**4},
        {"input": ["x", [5]]},
    )
    return target.ask_at_once(target.post(EMBEDDINGS, b) for b in bodies)


def poll_metrics(target: Target, draw: Random) -> list[int]:
    paths = ("/metrics", "/status/data", "/status/kernels", "/openapi.json")
    return target.ask_at_once(target.head("GET", draw.choice(paths)) for _ in range(16))


# -- gRPC


def grpc_socket(target: Target) -> socket.socket:
    return socket.create_connection((target.host, target.grpc_port), timeout=2)


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    """A frame of HTTP/2."""
    return len(data).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + data


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")


def send_grpc_noise(target: Target, draw: Random) -> list[int]:
    noise = draw.randbytes(20_000)
    settings = frame(4, 0, 0, b"\0\4\0\0\0\1" * 100) * 200
    pings = frame(6, 0, 0, b"x" * 8) * 3000
    endless = frame(1, 0, 1, b"\x83\x86") + frame(9, 0, 1, b"\0\1a\1b" * 1000) * 100
    window = frame(8, 0, 0, b"\x7f\xff\xff\xff") * 100
    http1 = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    pieces = (noise, http1, PREFACE + noise, PREFACE + settings, PREFACE + pings, PREFACE + endless, PREFACE + window)
    for data in pieces:
        with grpc_socket(target) as sock:
            try:
                sock.sendall(data)
                sock.recv(1 << 16)
            except OSError:
                pass  # it has heard enough, or has nothing to say
    return [CLOSED]


def reset_grpc_streams(target: Target, draw: Random) -> list[int]:
    """Requests that are each cancelled as soon as they are begun."""
    path = f"/{schema.SERVICE}/ModelInfer".encode()
    head = b"\x83\x86\x44" + bytes([len(path)]) + path + b"\x41\x01x\x5f\x10application/grpc\x40\x02te\x08trailers"
    streams = range(1, 3001, 2)
    data = b"".join(frame(1, 4, i, head) + frame(3, 0, i, b"\0\0\0\x08") for i in streams)
    with grpc_socket(target) as sock:
        try:
            sock.sendall(PREFACE + data)
            sock.recv(1 << 16)
        except OSError:
            pass  # it may close the connection of such a client
    return [CLOSED]


def send_grpc_messages(target: Target, draw: Random) -> list[int]:
    """Messages that are none, tensors that do not fit their shape, requests of the source system that are wrong."""
    made = schema.message("ModelInferRequest")
    bodies = [draw.randbytes(1000), b"", b"\xff" * 100_000]
    tensors: tuple[tuple[str, str, list[int], bytes], ...] = (
        ("input_ids", "UINT8", [10**6], bytes(10**6)),
        ("text_input", "BYTES", [10**5], bytes(4 * 10**5)),
        ("text_input", "BYTES", [1], b"\xff\xff\xff\xff"),
        ("n", "INT32", [1] * 10**4, bytes(4)),
        ("input_ids", "INT64", [-1, 2**62], bytes(8)),
        ("IN", "BYTES", [1], (lambda t: len(t).to_bytes(4, "little") + t)(json.dumps({"text": "x" * 10**6}).encode())),
    )
    for name, datatype, shape, raw in tensors:
        request = made(model_name=draw.choice(("model", "", "x" * 1000)), raw_input_contents=[raw])
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        bodies.append(request.SerializeToString())
    found = []
    key = draw.choice((target.key, target.key, "x"))
    with grpc.insecure_channel(f"{target.host}:{target.grpc_port}") as channel:
        send = channel.unary_unary(f"/{schema.SERVICE}/ModelInfer")  # bytes as they are
        for body in bodies:
            try:
                send(body, timeout=30, metadata=(("authorization", f"Bearer {key}"),))
                found.append(200)
            except grpc.RpcError as error:
                found.append(STATUS.get(error.code().name, 500))
    return found


def leave_grpc_streams(target: Target, draw: Random) -> list[int]:
    made = schema.message("ModelInferRequest")
    body = json.dumps({"text": "x", "max_dec_len": 400, "min_dec_len": 400}).encode()
    request = made(model_name="model", raw_input_contents=[len(body).to_bytes(4, "little") + body])
    request.inputs.add(name="IN", datatype="BYTES", shape=[1])
    with grpc.insecure_channel(f"{target.host}:{target.grpc_port}") as channel:
        stream = channel.stream_stream(f"/{schema.SERVICE}/ModelStreamInfer")
        calls = [
            stream(iter([request.SerializeToString()]), metadata=(("authorization", f"Bearer {target.key}"),))
            for _ in range(4)
        ]
        time.sleep(draw.choice((0.01, 0.1, 0.5)))
        for call in calls:
            call.cancel()
    return [CLOSED]

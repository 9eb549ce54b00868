"""Answers that no server should give: none ends the command with a traceback, and none is counted as what it is not."""

from __future__ import annotations

import asyncio

import pytest

from inferplane.cli.verbs.bench.serve.address import parse_url
from inferplane.cli.verbs.bench.serve.dialects import MAX_COUNT, AnswerReader, NativeReader, error_words
from inferplane.cli.verbs.bench.serve.event_stream import StreamError
from inferplane.cli.verbs.bench.serve.http_client import HttpClient, NoAnswerError
from tests.unit.support.scripted_server import STREAM, TEXTS, chunk, delta, event, scripted

NESTED = "[" * 100_000
DONE = event("[DONE]")


def sized(status: int, body: str) -> bytes:
    return (
        f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n{body}".encode()
    )


def streamed(*events: str) -> bytes:
    return STREAM.encode() + b"".join(map(chunk, events)) + b"0\r\n\r\n"


def texts(*more: str) -> bytes:
    return streamed(*(event(delta(text)) for text in TEXTS), event(delta(None, "stop")), *more)


def test_a_nested_list_of_models_is_an_error(bench):
    with scripted(listing=sized(200, NESTED)) as server:
        code, facts, _, err = bench(server.url)
    assert code == 2 and facts is None and "lists no model" in err and "Traceback" not in err


def test_a_nested_body_of_an_error_is_shown_as_text(bench, prompts):
    with scripted(answer=sized(500, NESTED)) as server:
        code, facts, _, err = bench(server.url, *prompts("a", "b"))
    assert code == 1 and facts["levels"][0]["counts"]["failures"]["other"] == 2 and "Traceback" not in err
    assert facts["levels"][0]["failure_examples"][0]["error"].startswith("500: [[[")
    assert error_words(NESTED.encode()).startswith("[[[")


@pytest.mark.parametrize("body", [NESTED, '{"choices": [{"delta": {"content": ' + NESTED, '{"error": ' + NESTED])
def test_a_nested_event_is_a_wrong_event(body, bench, prompts, caplog):
    with scripted(answer=streamed(event(delta("one")), event(body))) as server:
        _, facts, _, err = bench(server.url, *prompts("a", "b"))
    (level,) = facts["levels"]
    assert level["counts"]["failures"]["broken_stream"] == 2 and "Traceback" not in err
    assert "data_received" not in caplog.text, "the event loop saw no error of the client"
    assert all("an event is no chunk of an answer" in one["error"] for one in level["requests"])


def test_a_nested_line_of_the_native_dialect_is_a_wrong_event():
    with pytest.raises(StreamError, match="a line is no event"):
        NativeReader().feed(b'{"x": ' + NESTED.encode() + b"\n", 0.0)


def test_what_comes_after_the_end_does_not_count(bench, prompts):
    with scripted(
        answer=texts(DONE, event(delta("more")), event({"usage": {"completion_tokens": 99}}), event("{"))
    ) as one:
        code, facts, _, _ = bench(one.url, *prompts("a", "b"))
    (level,) = facts["levels"]
    assert code == 0 and level["counts"]["ended"] == 2 and level["tokens"]["output"] == 2 * len(TEXTS)
    native = NativeReader()
    native.feed(b'{"token": "a", "is_end": 1, "tokens_all_num": 1}\n{"token": "b", "is_end": 1}\n', 0.0)
    assert native.parts == ["a"] and native.output_tokens == 1


WRONG = [-1, 1.5, MAX_COUNT + 1, 10**30, "4", True, [4]]


@pytest.mark.parametrize("count", WRONG, ids=str)
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_counts_that_cannot_be_right_are_refused(name, count, bench, prompts):
    usage = {"prompt_tokens": 5, "completion_tokens": 4, name: count}
    with scripted(answer=texts(event({"choices": [], "usage": usage}), DONE)) as server:
        code, facts, _, err = bench(server.url, *prompts("a", "b"))
    tokens = facts["levels"][0]["tokens"]
    assert code == 0 and facts["levels"][0]["counts"]["ended"] == 2
    assert tokens == {
        "prompt": 0,
        "output": 2 * len(TEXTS),
        "counted_by": {"chunks": 2},
        "without_prompt_count": 2,
    }
    assert "usage was refused in 2 of its answers" in " ".join(err.split())


def test_a_wrong_count_is_not_taken_back_by_a_right_one():
    reader = AnswerReader()
    for count in (3, -1, 4):
        reader.read_event(b'{"usage": {"completion_tokens": %d}}' % count, 0.0)
    assert reader.has_wrong_usage and reader.output_tokens is None
    native = NativeReader()
    native.feed(b'{"token": "a", "is_end": 1, "tokens_all_num": -4}\n', 0.0)
    assert native.has_wrong_usage and native.output_tokens is None
    reader = AnswerReader()
    reader.read_event(b'{"usage": {"prompt_tokens": 0, "completion_tokens": %d}}' % MAX_COUNT, 0.0)
    assert (reader.prompt_tokens, reader.output_tokens, reader.has_wrong_usage) == (0, MAX_COUNT, False)


def test_requests_that_are_sent_again_are_reported(bench, prompts, tmp_path):
    page = tmp_path / "page.html"
    with scripted(script="once") as server:
        words = (*prompts(*(["ok"] * 6)), "--concurrency", "1", "--html", str(page))
        code, facts, out, _ = bench(server.url, *words)
        _, swept, both, _ = bench(server.url, *words[:-4], "--concurrency", "1,1")
    counts = facts["levels"][0]["counts"]
    assert code == 0 and (counts["sent"], counts["ended"], counts["resent"]) == (6, 6, 6)
    line = "6 requests sent again, since the server closed a reused connection unanswered"
    assert line in " ".join(out.split()) and line in page.read_text() and " ".join(both.split()).count(line) == 2
    assert [level["counts"]["resent"] for level in swept["levels"]] == [6, 6], "each level counts its own"
    with scripted(script="ok") as server:
        _, facts, out, _ = bench(server.url, *prompts("a", "b"))
    assert facts["levels"][0]["counts"]["resent"] == 0 and "sent again" not in out


def test_letters_beyond_ascii_of_a_path_are_encoded(bench):
    with scripted() as server:
        code, facts, _, _ = bench(f"{server.url}/\xfc", "--requests", "1")
    assert code == 0 and facts["levels"][0]["counts"]["ended"] == 1
    assert server.heads[0].startswith("GET /%C3%BC/v1/models ") and server.heads[-1].startswith("POST /%C3%BC/v1/chat/")


@pytest.mark.parametrize("header", [("a(b", "B"), ("Host", "other"), ("Content-Length", "5")])
def test_a_request_that_is_no_http_is_a_failure_of_its_own_kind(header):
    async def send(server):
        client = HttpClient(parse_url(server.url), [header], None)
        with pytest.raises(NoAnswerError, match="the request is no HTTP"):
            await client.get("/v1/models", 10.0)
        while server.opened < client.opened:
            await asyncio.sleep(0.005)

    with scripted() as server:
        asyncio.run(send(server))
        assert not server.heads, "nothing was sent"

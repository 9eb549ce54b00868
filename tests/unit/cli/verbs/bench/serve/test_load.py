"""Loads on a server that misbehaves: what is measured, what fails as what, and that every request is counted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
import xml.etree.ElementTree as xml
from itertools import pairwise
from statistics import fmean

import pytest

from inferplane.cli import main
from inferplane.cli.verbs.bench.serve.records import FAILURES
from tests.unit.support.scripted_server import USAGE, scripted


def test_what_ends_is_measured(bench, prompts):
    with scripted() as server:
        words = prompts(*(["slow"] * 6))
        code, facts, out, _ = bench(server.url, *words, "--concurrency", "2", "--goodput", "ttft:60000", "e2e:0.001")
    (level,) = facts["levels"]
    assert code == 0 and level["counts"]["ended"] == 6 and facts["environment"]["server"] == "scripted"
    assert level["tokens"] == {
        "prompt": 6 * USAGE["prompt_tokens"],
        "output": 6 * USAGE["completion_tokens"],
        "counted_by": {"usage": 6},
        "without_prompt_count": 0,
    }
    assert {name: one["count"] for name, one in level["latencies"].items()} == {
        "ttft": 6,
        "itl": 12,
        "tpot": 6,
        "e2e": 6,
    }
    assert level["requests_running"]["max"] == 2
    for one in level["requests"]:
        assert one["e2e_s"] == pytest.approx(one["ttft_s"] + 3 * one["tpot_s"]) and one["finish_reason"] == "stop"
    assert level["rates"]["requests"]["value"] == pytest.approx(6 / level["duration_s"])
    assert level["rates"]["output_tokens"]["value"] == pytest.approx(24 / level["duration_s"])
    assert level["rates"]["goodput"]["value"] == 0 == level["counts"]["met_targets"]
    assert "6 requests sent" in out and "6 ended, 0 failed" in out and "time to first token" in out
    assert server.bodies[0]["stream"] is True and server.bodies[0]["stream_options"] == {"include_usage": True}
    assert server.bodies[0]["max_tokens"] == 3 and server.bodies[0]["model"] == "scripted"
    assert server.opened <= 3, "connections are reused: one for the list of models, and one for each place"


@pytest.mark.parametrize("form", ["pieces", "crlf", "old", "sized"])
def test_forms_of_streams(form, bench, prompts):
    with scripted() as server:
        code, facts, _, _ = bench(server.url, *prompts(form, form))
    assert code == 0 and facts["levels"][0]["counts"]["ended"] == 2 and facts["levels"][0]["tokens"]["output"] == 8


def test_a_connection_that_the_server_closes_while_idle_is_no_failure(bench, prompts):
    with scripted(script="once") as server:
        code, facts, _, _ = bench(server.url, *prompts(*(["ok"] * 6)), "--concurrency", "2")
    assert code == 0 and facts["levels"][0]["counts"]["ended"] == 6 and server.opened >= 6


def test_control_characters_of_a_server_reach_no_terminal(bench, prompts):
    with scripted(models=("a\x1b[2J", "b")) as server:
        _, facts, out, err = bench(server.url, *prompts("hostile"))
        assert facts["environment"]["model"] == "b" and "\x1b" not in out + err and "b" in out
        server.script = "hostile"
        code, _, out, err = bench(server.url)
    assert code == 1 and "did not answer the first request: 500: a" in err and "\x1b" not in out + err


EXPECTED = {
    "429": ("refused", "429: no, 429"),
    "503": ("refused", "503: no, 503"),
    "504": ("timeout", "504: no"),
    "500": ("other", "500: no"),
    "400": ("other", "400: no"),
    "close": ("connection", "closed the connection without an answer"),
    "dies": ("broken_stream", "closed in the middle of the answer"),
    "garbage": ("broken_stream", "no chunk of an answer"),
    "fails": ("refused", "out of memory"),
    "endless": ("broken_stream", "without a finish_reason"),
    "json": ("other", "no stream of events (application/json"),
    "moved": ("other", "redirects to https://elsewhere/"),
}


def test_failures_by_kind(bench, prompts):
    each = [*EXPECTED, "ok", "429", "ok"]
    with scripted() as server:
        code, facts, out, _ = bench(server.url, *prompts(*each), "--concurrency", "3")
    (level,) = facts["levels"]
    assert code == 0 and level["counts"]["ended"] == 2 and level["counts"]["sent"] == len(each)
    found = {kind: sum(EXPECTED.get(word, ("",))[0] == kind for word in each) for kind in FAILURES}
    assert level["counts"]["failures"] == found
    errors = [one["error"] for one in level["failure_examples"]]
    for word, (kind, text) in EXPECTED.items():
        assert any(text in one["error"] and one["failure"] == kind for one in level["requests"]), word
    assert f"{found['refused']} refused (429, 503)" in " ".join(out.split())
    assert errors[0] == "429: no, 429" and "2 x refused (429, 503): 429: no, 429" in out
    assert level["latencies"]["ttft"]["count"] == 2, "latencies are of requests that ended"


@pytest.mark.parametrize("what", ["hang", "stall"])
def test_a_request_that_takes_too_long(what, bench, prompts):
    with scripted() as server:
        begun = time.monotonic()
        code, facts, _, _ = bench(server.url, *prompts(what, "ok", what), "--timeout", "2", "--concurrency", "3")
    assert facts["levels"][0]["counts"]["failures"]["timeout"] == 2 and code == 0
    assert facts["levels"][0]["counts"]["ended"] == 1 and time.monotonic() - begun < 30


def test_nothing_that_ends_is_an_exit_code(bench, prompts):
    with scripted() as server:
        code, facts, out, _ = bench(server.url, *prompts("500", "500"))
    assert code == 1 and facts["levels"][0]["latencies"]["ttft"] is None and "0 ended, 2 failed (2 other)" in out


def test_a_server_that_dies_in_the_middle(bench, prompts):
    with scripted() as server:
        words = prompts(*(["slow"] * 400))

        def die():
            while len(server.bodies) < 20:
                time.sleep(0.005)
            server.stop()

        killer = threading.Thread(target=die)
        killer.start()
        code, facts, _, _ = bench(server.url, *words, "--concurrency", "4")
        killer.join()
    counts = facts["levels"][0]["counts"]
    assert code == 0 and counts["sent"] == 400 and counts["ended"] >= 10
    assert (
        counts["failures"]["connection"] >= 1
        and counts["failures"]["connection"] + counts["failures"]["broken_stream"] == counts["failed"]
    )


def test_a_place_whose_connection_failed_waits(bench, prompts):
    with scripted() as server:
        code, facts, _, _ = bench(server.url, *prompts(*(["close"] * 10)), "--concurrency", "2")
    (level,) = facts["levels"]
    assert code == 1 and level["counts"]["failures"]["connection"] == 10 and level["duration_s"] >= 4 * 0.1


def test_ctrl_c_reports_what_was_measured(bench, prompts):
    with scripted() as server:
        words = prompts(*(["ok"] * 5), *(["hang"] * 5))

        def interrupt():
            while len(server.bodies) < 7:
                time.sleep(0.005)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGINT)

        pressing = threading.Thread(target=interrupt)
        pressing.start()
        before = signal.getsignal(signal.SIGINT)
        code, facts, out, _ = bench(server.url, *words, "--concurrency", "2")
        pressing.join()
    counts = facts["levels"][0]["counts"]
    assert code == 130 and counts["ended"] == 5 and counts["failures"]["interrupted"] == 2 == counts["failed"]
    assert facts["levels"][0]["interrupted"] and "interrupted" in out and signal.getsignal(signal.SIGINT) is before


# ---------------------------------------------------------------- what servers differ in


def test_a_server_without_usage(bench, prompts, tmp_path):
    from tests.unit.cli.verbs.bench.serve.test_datasets import DEMO

    with scripted() as server:
        _, facts, out, err = bench(server.url, *prompts("uncounted", "uncounted"))
        _, exact, _, _ = bench(server.url, *prompts("uncounted", "uncounted"), "--tokenizer", str(DEMO))
    tokens = facts["levels"][0]["tokens"]
    assert tokens["counted_by"] == {"chunks": 2} and tokens["output"] == 6 and tokens["without_prompt_count"] == 2
    assert "gives no usage" in err and "events with text" in out
    assert exact["levels"][0]["tokens"]["counted_by"] == {"tokenizer": 2} and exact["levels"][0]["tokens"]["output"] > 2


def test_a_server_that_refuses_the_field_for_usage(bench):
    with scripted(script="strict") as server:
        code, facts, _, _ = bench(server.url, "--requests", "3")
    assert code == 0 and facts["levels"][0]["counts"]["ended"] == 3
    assert "refuses stream_options" in facts["notes"][0] and "stream_options" not in server.bodies[-1]


def test_keys_headers_and_extra_fields(bench, monkeypatch):
    monkeypatch.setenv("INFERPLANE_API_KEY", "sesame,second")
    extra = '{"min_p": 0.1, "max_tokens": null, "max_completion_tokens": 7}'
    with scripted(script="ok", models=("a", "b")) as server:
        words = (
            "--extra-body",
            extra,
            "--header",
            "X-Tenant: t",
            "--ignore-eos",
            "--temperature",
            "0.5",
            "--requests",
            "2",
        )
        _, facts, out, err = bench(f"{server.url}/some/prefix/v1", *words)
        bench(server.url, "--api-key", "mine", "--model", "b", "--requests", "1")
    post = next(head for head in server.heads if head.startswith("POST"))
    assert post.startswith("POST /some/prefix/v1/chat/completions ") and server.heads[0].startswith(
        "GET /some/prefix/v1/models "
    )
    lines = {line.lower() for line in post.split("\r\n")}
    assert {"authorization: bearer sesame", "x-tenant: t"} <= lines
    assert "authorization: bearer mine" in server.heads[-1].lower()
    body = server.bodies[0]
    assert (body["min_p"], body["max_completion_tokens"], body["ignore_eos"], body["temperature"]) == (
        0.1,
        7,
        True,
        0.5,
    )
    assert "max_tokens" not in body and body["model"] == "a" and server.bodies[-1]["model"] == "b"
    assert "sesame" not in json.dumps(facts) + out + err


def test_a_warm_up_takes_none_of_the_datasets_prompts(bench, prompts):
    with scripted() as server:
        words = [word for word in prompts("ok a", "ok b", "ok c") if word not in ("--warmup", "0")]
        code, facts, _, err = bench(server.url, *words, "--warmup", "3")
    sent = [body["messages"][0]["content"] for body in server.bodies]
    assert code == 0 and len(sent) == 6 and sorted(sent[3:]) == ["ok a", "ok b", "ok c"] and len(set(sent)) == 6
    assert "more than once" not in err and facts["levels"][0]["counts"]["sent"] == 3


def test_conversations_send_the_answers_back(bench):
    with scripted(script="ok") as server:
        words = (
            "--conversation-len",
            "3",
            "--requests",
            "6",
            "--concurrency",
            "1",
            "--warmup",
            "0",
            "--think-time",
            "0.01",
        )
        _, facts, _, _ = bench(server.url, *words)
    assert [len(body["messages"]) for body in server.bodies] == [1, 3, 5, 1, 3, 5]
    assert server.bodies[2]["messages"][:4] == [
        *server.bodies[1]["messages"],
        {"role": "assistant", "content": "one two three"},
    ]
    requests = facts["levels"][0]["requests"]
    assert all(b["sent_s"] > a["finished_s"] for a, b in pairwise(requests[:3]))


def test_a_conversation_ends_with_its_first_failure(bench, tmp_path):
    path = tmp_path / "talk.jsonl"
    path.write_text(json.dumps({"conversation": [{"prompt": "ok"}, {"prompt": "500"}, {"prompt": "ok"}]}) + "\n")
    with scripted() as server:
        words = ("--dataset", str(path), "--requests", "3", "--warmup", "0", "--concurrency", "1")
        _, facts, out, _ = bench(server.url, *words)
    counts = facts["levels"][0]["counts"]
    assert [counts[name] for name in ("sent", "ended", "not_sent")] == [2, 1, 1]
    assert "1 of their conversations not sent" in " ".join(out.split())


# ---------------------------------------------------------------- levels


def test_a_sweep_has_a_row_and_a_page_for_every_level(bench, tmp_path):
    page = tmp_path / "page.html"
    with scripted(script="slow") as server:
        words = ("--concurrency", "1,2,4", "--requests", "8", "--html", str(page), "--goodput", "ttft:5000", "tpot:500")
        code, facts, out, _ = bench(server.url, *words)
    assert code == 0 and [level["load"]["concurrency"] for level in facts["levels"]] == [1, 2, 4]
    assert [level["requests_running"]["max"] for level in facts["levels"]] == [1, 2, 4]
    assert [level["rates"]["goodput"] for level in facts["levels"]] == [
        level["rates"]["requests"] for level in facts["levels"]
    ]
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 25, "no level repeats a prompt of another"
    assert re.search(r"^2 +8 +0 ", out, re.MULTILINE) and "latencies are in milliseconds" in " ".join(out.split())
    drawn = re.findall(r"<svg.*?</svg>", page.read_text(), re.DOTALL)
    curves = [xml.fromstring(svg) for svg in drawn if "<circle" in svg]
    assert len(drawn) == 3 + 3 * 6 and [len(curve.findall("circle")) for curve in curves] == [6, 6, 6]
    assert {t.text for t in curves[0].findall("text")} >= {"1", "2", "4", "p50", "p99", "output tokens/s"}
    assert "<script" not in page.read_text() and "http" not in re.sub(r"http://127[^<]*", "", page.read_text())


def test_a_rate_sends_when_due_whatever_the_server_does(bench, prompts):
    with scripted() as server:
        words = prompts(*(["slow"] * 40))
        code, facts, out, _ = bench(server.url, *words, "--rate", "100", "--arrivals", "constant")
        _, all_at_once, _, _ = bench(server.url, *words, "--rate", "inf", "--concurrency", "5")
    (level,) = facts["levels"]
    assert code == 0 and [r["due_s"] for r in level["requests"]] == pytest.approx([i / 100 for i in range(40)])
    assert all(r["sent_s"] >= r["due_s"] for r in level["requests"]) and level["sent_late"]["count"] == 40
    assert level["load"]["rate"] == "100" and "sent" in out and "late (p99)" in out
    assert (
        all_at_once["levels"][0]["requests_running"]["max"] == 5 and all_at_once["levels"][0]["counts"]["ended"] == 40
    )


def test_a_duration_ends_the_sending_and_a_dataset_begins_again(bench, prompts):
    with scripted() as server:
        words = [word for word in prompts("slow") if word not in ("--requests", "1")]
        _, facts, _, err = bench(server.url, *words, "--duration", "0.5", "--concurrency", "2")
    (level,) = facts["levels"]
    assert level["counts"]["ended"] == level["counts"]["sent"] >= 2 and level["load"]["requests"] is None
    assert max(r["sent_s"] for r in level["requests"]) < 0.5 + 5
    assert "used more than once" in err


def test_three_hundred_connections(bench):
    with scripted(script="slow") as server:
        _, facts, _, _ = bench(
            server.url, "--concurrency", "300", "--requests", "600", "--output-len", "3", "--input-len", "1"
        )
    assert facts["levels"][0]["counts"]["ended"] == 600 and facts["levels"][0]["requests_running"]["max"] == 300


# ---------------------------------------------------------------- servers that are none


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("url", ["http://127.0.0.1:{port}", "https://127.0.0.1:{port}", "127.0.0.1:{port}/v1"])
def test_nothing_listens(url, bench):
    code, facts, _, err = bench(url.format(port=free_port()))
    assert code == 1 and facts is None and "could not be made" in err and "to do: check --url" in err


def test_a_host_that_does_not_exist(bench):
    code, _, _, err = bench("http://no-such-host.invalid:1")
    assert code == 1 and "could not be made" in err and "Traceback" not in err


def test_https_to_a_server_of_http(bench, monkeypatch):
    monkeypatch.setattr("inferplane.cli.verbs.bench.serve.benchmark.CHECK_S", 1.0)
    with scripted() as server:
        code, _, _, err = bench(server.url.replace("http", "https"))
    assert code == 1 and "perhaps the server speaks http://" in err


def test_a_server_of_something_else(bench):
    async def answer(reader, writer):
        writer.write(b"SSH-2.0-x\r\n\r\n")
        writer.close()

    with scripted() as server:
        other = asyncio.run_coroutine_threadsafe(asyncio.start_server(answer, "127.0.0.1", 0), server.loop).result(30)
        code, _, _, err = bench(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}")
    assert code == 1 and ("the answer is no HTTP" in err or "before a request was sent" in err)


def test_a_list_without_models_and_a_first_request_that_fails(bench):
    with scripted(models=(), script="404") as server:
        code, _, _, err = bench(server.url)
        assert code == 2 and "lists no model" in err and "pass --model" in err
        code, facts, _, err = bench(server.url, "--model", "x")
    assert (
        code == 1 and facts is None and "did not answer the first request: 404: no, 404" in err and "--endpoint" in err
    )


def test_a_model_in_place_of_a_url_and_options_before_the_verb(bench, capsys):
    code, _, _, err = bench("http://127.0.0.1:9", "demo")
    assert code == 2 and "takes no model: 'demo'" in err and "pass its address as --url" in err
    assert main.main(["bench", "--json", "serve", "--requests", "0"]) == 2
    assert json.loads(capsys.readouterr().err)["error"]["what"].startswith("--requests 0")


def test_more_connections_than_open_files(bench, monkeypatch):
    monkeypatch.setattr("inferplane.cli.verbs.bench.serve.benchmark.limit_connections", lambda number: min(number, 100))
    code, _, _, err = bench("http://127.0.0.1:1", "--concurrency", "1000")
    assert code == 2 and "--concurrency 1000 needs as many open files" in err and "100 connections" in err


def test_means_of_running_requests(bench, prompts):
    with scripted() as server:
        _, facts, _, _ = bench(server.url, *prompts(*(["slow"] * 8)), "--concurrency", "1")
    (level,) = facts["levels"]
    spent = sum(r["finished_s"] - r["sent_s"] for r in level["requests"])
    assert level["requests_running"] == {"mean": pytest.approx(spent / level["duration_s"]), "max": 1}
    assert fmean(r["e2e_s"] for r in level["requests"]) == pytest.approx(level["latencies"]["e2e"]["mean"])

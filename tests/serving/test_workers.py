"""Several processes for HTTP over one engine: the same answers, one queue, ended together."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.serving.live import Live

BODY = {"model": "default", "prompt": "def main():", "max_tokens": 8, "temperature": 0}


def workers(live: Live) -> list[int]:
    """Processes of the server that run a worker."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and b"lifecycle.worker" in (folder / "cmdline").read_bytes():
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                found += [int(folder.name)] if parent == live.process.pid else []
        except OSError:
            continue
    return found


def mapped(pid: int) -> str:
    """Files that a process has in its memory."""
    return Path(f"/proc/{pid}/maps").read_text()


def answer(live: Live, **more: Any) -> Any:
    """A request over a connection of its own, so that any process may take it; the process's log tells which did."""
    with httpx.Client(base_url=live.url, timeout=120) as client:
        return client.post("/v1/completions", json={**BODY, **more})


def all_ready(live: Live, count: int) -> None:
    limit = time.monotonic() + 90
    while sum(e["event"] == "ready" for e in live.log) < count:
        assert time.monotonic() < limit, live.text[-3000:]
        time.sleep(0.05)


def always_served(live: Live, count: int) -> None:
    """Ask for health until `count` processes are ready, and a little longer: every process that answers is ready."""
    limit = time.monotonic() + 90
    left = 200
    while left:
        with httpx.Client(base_url=live.url, timeout=60) as client:
            found = client.get("/health")
        assert found.status_code == 200, found.text
        assert time.monotonic() < limit, live.text[-3000:]
        left -= sum(e["event"] == "ready" for e in live.log) >= count


def test_workers_share_the_engine_are_replaced_and_end_together():
    with Live("--http-workers", "3") as live:
        always_served(live, 3)
        assert len(workers(live)) == 2
        with ThreadPoolExecutor(24) as pool:
            texts = {
                a.raise_for_status().json()["choices"][0]["text"] for a in pool.map(lambda _: answer(live), range(48))
            }
        assert len(texts) == 1
        for pid in (live.process.pid, *workers(live)):  # the engine's process has torch, and it alone
            assert "/tokenizers" in mapped(pid) and "/torch/" not in mapped(pid)
        stats = live.at_rest()
        assert stats['inferplane:request_success_total{finished_reason="length"}'] == 48  # one engine counted them all
        os.kill(workers(live)[0], signal.SIGKILL)
        live.event("a worker ended")
        always_served(live, 4)
        assert len(workers(live)) == 2
        assert answer(live).status_code == 200
        with ThreadPoolExecutor(6) as pool:
            running = [pool.submit(answer, live, max_tokens=60, ignore_eos=True) for _ in range(6)]
            limit = time.monotonic() + 60
            while live.metrics()["inferplane:num_requests_running"] < 6 and time.monotonic() < limit:
                time.sleep(0.02)
            live.process.send_signal(signal.SIGTERM)
            done = [r.result() for r in running]
        assert [d.json()["usage"]["completion_tokens"] for d in done] == [60] * 6
        assert live.process.wait(60) == 0
        assert live.stop() == 0  # the log is read to its end
        assert workers(live) == []
        assert [line for line in live.text.splitlines() if not line.startswith("{")] == []
        assert {e.get("worker") for e in live.log if e["event"] == "draining"} == {None, 1, 2}
        assert sum(e["event"] == "listening" for e in live.log) == 1


def test_workers_end_with_a_killed_server():
    with Live("--http-workers", "2") as live:
        all_ready(live, 2)
        (worker,) = workers(live)
        live.process.kill()
        live.process.wait()
        limit = time.monotonic() + 30
        while (
            Path(f"/proc/{worker}").exists()
            and "Z" not in Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2][:3]
        ):
            assert time.monotonic() < limit
            time.sleep(0.05)

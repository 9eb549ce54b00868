"""Fails the N-th call of every function between the tokenizer and the log, for each N until no call is left.

For every N each request ends exactly once. Then the server either holds nothing and answers as before, or its engine is
dead and the health routes say so.
"""

from __future__ import annotations

import asyncio
import logging
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from inferplane.confined import ConfinedProcess
from inferplane.engine.clients import local, streams
from inferplane.engine.clients.inputs import InputProcessor
from inferplane.engine.clients.llm import LLM
from inferplane.engine.clients.process import messages, remote
from inferplane.engine.clients.process import server as process
from inferplane.engine.loop import engine
from inferplane.engine.loop.metrics import Metrics
from inferplane.engine.request.constraint import Constraint
from inferplane.engine.request.state import Request
from inferplane.engine.request.text import Detokenizer
from inferplane.engine.runner.model_runner import Runner
from inferplane.engine.sampling.sampler import Sampler
from inferplane.engine.schedule.scheduler import Scheduler
from inferplane.kvcache import BlockAllocator
from inferplane.serving import logs, native
from inferplane.serving.chat.rendering import ChatRendering
from inferplane.serving.generation import Generation
from inferplane.serving.http import completions
from inferplane.serving.model import ServedModel
from inferplane.serving.service import Service
from tests.serving.faults import Fault, Small, failing, run

SEAMS: dict[str, tuple[Any, str]] = {
    "tokenizer": (ServedModel, "encode"),
    "chat template": (ConfinedProcess, "ask"),
    "admission": (Service, "_accept"),
    "generation": (Generation, "start"),
    "submission": (local.LocalEngine, "submit"),
    "grammar": (LLM, "constraint"),
    "grammar's mask": (Constraint, "masks"),
    "grammar's step": (Constraint, "accept"),
    "request": (LLM, "add"),
    "blocks": (BlockAllocator, "allocate"),
    "schedule": (Scheduler, "schedule"),
    "queue": (Scheduler, "add"),
    "queries": (Scheduler, "queries"),
    "commit": (Scheduler, "commit"),
    "batch": (engine, "make_batch"),
    "forward": (Runner, "run"),
    "sampler's rows": (Sampler, "prepare"),
    "sampler": (Sampler, "sample"),
    "log-probabilities": (Sampler, "logprobs"),
    "detokenizer's start": (InputProcessor, "detokenizer"),
    "detokenizer": (Detokenizer, "push"),
    "text": (Detokenizer, "take"),
    "step": (engine.Engine, "step"),
    "timings": (Request, "timings"),
    "engine's metrics": (Metrics, "observe"),
    "delivery": (streams.Mailbox, "deliver"),
    "piece": (Generation, "_receive"),
    "completion's piece": (completions.CompletionRendering, "piece"),
    "completion's whole": (completions.CompletionRendering, "full_response"),
    "chat's piece": (ChatRendering, "piece"),
    "chat's end": (ChatRendering, "closing"),
    "native piece": (native.NativeRendering, "piece"),
    "log": (logs.JsonLines, "format"),
    "socket": (Small, "written"),
}
"""Functions that fail one after the other."""
MOST = 200
"""Faults at one seam; a test that needs more hangs in a loop."""


MESSAGES: dict[str, tuple[Any, str]] = {
    "a message's form": (messages, "frame"),
    "a message's length": (messages, "body_bytes"),
    "the engine reads": (process.Connection, "receive"),
    "the engine writes": (asyncio.StreamWriter, "write"),
    "the server reads": (remote.RemoteEngine, "_receive"),
    "the server handles": (remote.RemoteEngine, "_handle"),
    "delivery beyond": (process.Connection, "deliver"),
    "delivery here": (streams.Mailbox, "deliver"),
    "an answer": (remote.RemoteEngine, "_settle"),
}
"""Further functions that fail, if the engine has its own process."""


def fail_each(folder: Path, owner: Any, method: str, error: Exception, *, by_messages: bool) -> None:
    """Fail the first call, then the second, ... until a run in which nothing failed."""

    async def work(server: Small) -> None:
        for n in count(1):
            await server.start()
            with failing(owner, method, n, error) as fault:
                found = await server.ask()
            fates, alive = server.outcomes(found), await server.at_rest()
            if fault.calls < n:
                assert fates == ["whole"] * len(fates) and alive
                break
            assert n < MOST
            assert "cut off" not in fates or isinstance(error, OSError), (n, fates)
        assert n > 1, "this seam was never reached"

    run(folder, work, by_messages=by_messages)


@pytest.mark.parametrize("name", SEAMS)
def test_each_call_fails_once(name, tmp_path):
    error = OSError("on purpose") if name == "socket" else Fault("on purpose")
    fail_each(tmp_path, *SEAMS[name], error, by_messages=False)


@pytest.mark.parametrize("name", MESSAGES)
def test_each_message_fails_once(name, tmp_path):
    fail_each(tmp_path, *MESSAGES[name], Fault("on purpose"), by_messages=True)


@pytest.mark.parametrize("by_messages", [False, True])
def test_the_place_of_a_fault_is_logged_and_not_sent(by_messages, tmp_path, monkeypatch):
    """Clients read what failed; the file and line of a plugin's code are for those who run the server."""

    def fail(runner: Any, batch: Any) -> Any:
        raise Fault("a kernel")

    place = f"{__file__}:{fail.__code__.co_firstlineno + 1}"
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]

    async def work(server: Small) -> None:
        await server.start()
        with monkeypatch.context() as patch:
            patch.setattr(logging.getLogger("inferplane.serving"), "handlers", [handler])
            patch.setattr(Runner, "run", fail)
            found = await server.ask()
        assert all("Fault: a kernel" in text and __file__ not in text for _, text, _ in found), found
        facts = [vars(r).get("facts", {}) for r in records if r.msg == "a sequence failed in the engine"]
        assert facts and all(fact["why"] == f"Fault: a kernel at {place}" for fact in facts), facts
        assert await server.at_rest()

    run(tmp_path, work, by_messages=by_messages)

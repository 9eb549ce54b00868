"""Names of the engine in 0.1, which work until 0.3 with a DeprecationWarning: of options, functions and keywords."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import subprocess
import sys
import warnings

import pytest

import inferplane.engine
from inferplane.engine import AsyncLLM, Runner, RunnerOptions, SamplingParams, describe_captured_steps
from inferplane.engine.clients.process.remote import RemoteEngine
from inferplane.errors import UsageError

OPTIONS = {
    "kv_dtype": ("kv_cache_dtype", "int8"),
    "max_batch": ("max_num_seqs", 3),
    "copies": ("max_repacked_fraction", None),
    "drafts": ("num_drafts", 2),
    "drafting_layer": ("has_draft_layer", True),
}


@pytest.mark.parametrize("old", OPTIONS)
def test_options_of_a_runner(old):
    new, value = OPTIONS[old]
    with pytest.warns(DeprecationWarning, match=f"RunnerOptions.{old} is deprecated; use {new}"):
        options = RunnerOptions(**{old: value})
    assert options == RunnerOptions(**{new: value}) != RunnerOptions()
    with pytest.warns(DeprecationWarning, match=f"use {new}"):
        assert getattr(options, old) == value
    with pytest.warns(DeprecationWarning, match=f"use {new}"):
        assert dataclasses.replace(RunnerOptions(), **{old: value}) == options
    with pytest.warns(DeprecationWarning, match=old), pytest.raises(UsageError, match=f"{old} and {new} are the same"):
        RunnerOptions(**{old: value, new: value})


def test_new_options_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dataclasses.replace(RunnerOptions(max_num_seqs=3), num_drafts=1).max_num_seqs == 3


def test_functions():
    with pytest.warns(DeprecationWarning, match="engine.recorded_steps is deprecated; use describe_captured_steps"):
        assert inferplane.engine.recorded_steps is describe_captured_steps
    with pytest.raises(AttributeError, match="surely_not"):
        _ = inferplane.engine.surely_not
    runner = object.__new__(Runner)
    with pytest.warns(DeprecationWarning, match="Runner.offer is deprecated; use kv_layouts"):
        assert runner.offer == runner.kv_layouts


def test_who_is_told_of_warnings(monkeypatch):
    told, heard = [], []

    def start(model, options, on_warning):
        told.append((on_warning, "warned" in options))
        raise KeyboardInterrupt

    monkeypatch.setattr(RemoteEngine, "start", start)
    message = "warned of AsyncLLM.__init__ is deprecated; use on_warning"
    with pytest.warns(DeprecationWarning, match=message), pytest.raises(KeyboardInterrupt):
        AsyncLLM(process=True, warned=heard.append)
    assert told == [(heard.append, False)]
    with (
        pytest.warns(DeprecationWarning, match="warned"),
        pytest.raises(UsageError, match="warned and on_warning are the same"),
    ):
        AsyncLLM(process=True, warned=print, on_warning=print)
    with (
        pytest.warns(DeprecationWarning, match="warned"),
        pytest.raises(UsageError, match="on_warning without process=True"),
    ):
        AsyncLLM(warned=print)


def test_feed():
    async def run():
        llm, pieces = AsyncLLM("demo", device="cpu"), []
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            await llm.feed(take=pieces.append, prompt="def", params=SamplingParams(max_tokens=3), alone="a")
            with pytest.raises(UsageError, match="alone and exclusive_id are the same"):
                await llm.feed(pieces.append, "def", alone="a", exclusive_id="b")
        await llm.shutdown()
        return pieces, {str(w.message) for w in found}

    pieces, messages = asyncio.run(run())
    assert pieces[-1].finish_reason == "length"
    for old, new in (("take", "on_piece"), ("alone", "exclusive_id")):
        assert f"{old} of AsyncLLM.feed is deprecated; use {new} (removed in 0.3)." in messages
    assert {"on_piece", "exclusive_id"} < set(inspect.signature(AsyncLLM.feed).parameters)


def test_old_names_need_no_torch():
    code = (
        "import sys, inferplane.engine.clients.async_llm, inferplane.renamed\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Requests, batches, steps: what turns a bound model into generated text.

The names below are imported when they are first used: a process whose engine lives in another one needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferplane.engine.async_llm import AsyncLLM
    from inferplane.engine.explained import recorded_steps
    from inferplane.engine.llm import LLM
    from inferplane.engine.params import SamplingParams
    from inferplane.engine.results import Delta, Result, Timings
    from inferplane.engine.runner import Runner, RunnerOptions
    from inferplane.engine.sources import ModelFiles
    from inferplane.engine.speculate import SpeculativeConfig
    from inferplane.errors import InferplaneWarning

__all__ = [
    "LLM",
    "AsyncLLM",
    "Delta",
    "InferplaneWarning",
    "ModelFiles",
    "Result",
    "Runner",
    "RunnerOptions",
    "SamplingParams",
    "SpeculativeConfig",
    "Timings",
    "recorded_steps",
]

_WHERE = {
    "AsyncLLM": "inferplane.engine.async_llm",
    "Delta": "inferplane.engine.results",
    "InferplaneWarning": "inferplane.errors",
    "LLM": "inferplane.engine.llm",
    "ModelFiles": "inferplane.engine.sources",
    "Result": "inferplane.engine.results",
    "Runner": "inferplane.engine.runner",
    "RunnerOptions": "inferplane.engine.runner",
    "SamplingParams": "inferplane.engine.params",
    "SpeculativeConfig": "inferplane.engine.speculate",
    "Timings": "inferplane.engine.results",
    "recorded_steps": "inferplane.engine.explained",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

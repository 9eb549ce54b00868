"""Requests, batches, steps: what turns a bound model into generated text.

The names below are imported when they are first used: a process whose engine lives in another one needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from inferplane.renamed import warn_of_old_name

if TYPE_CHECKING:
    from inferplane.engine.clients.async_llm import AsyncLLM as AsyncLLM
    from inferplane.engine.clients.chat import ChatDelta as ChatDelta
    from inferplane.engine.clients.chat import ChatResult as ChatResult
    from inferplane.engine.clients.llm import LLM as LLM
    from inferplane.engine.request.params import SamplingParams as SamplingParams
    from inferplane.engine.request.results import Delta as Delta
    from inferplane.engine.request.results import Result as Result
    from inferplane.engine.request.results import Timings as Timings
    from inferplane.engine.runner.model_files import ModelFiles as ModelFiles
    from inferplane.engine.runner.model_runner import Runner as Runner
    from inferplane.engine.runner.options import RunnerOptions as RunnerOptions
    from inferplane.engine.runner.planned_model import describe_captured_steps as describe_captured_steps
    from inferplane.engine.speculate import SpeculativeConfig as SpeculativeConfig
    from inferplane.errors import InferplaneWarning as InferplaneWarning

_WHERE = {
    "AsyncLLM": "inferplane.engine.clients.async_llm",
    "ChatDelta": "inferplane.engine.clients.chat",
    "ChatResult": "inferplane.engine.clients.chat",
    "Delta": "inferplane.engine.request.results",
    "InferplaneWarning": "inferplane.errors",
    "LLM": "inferplane.engine.clients.llm",
    "ModelFiles": "inferplane.engine.runner.model_files",
    "Result": "inferplane.engine.request.results",
    "Runner": "inferplane.engine.runner.model_runner",
    "RunnerOptions": "inferplane.engine.runner.options",
    "SamplingParams": "inferplane.engine.request.params",
    "SpeculativeConfig": "inferplane.engine.speculate",
    "Timings": "inferplane.engine.request.results",
    "describe_captured_steps": "inferplane.engine.runner.planned_model",
}

_RENAMED = {"recorded_steps": "describe_captured_steps"}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warn_of_old_name(f"{__name__}.{name}", _RENAMED[name])
        name = _RENAMED[name]
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__

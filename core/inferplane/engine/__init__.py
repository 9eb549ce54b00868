"""Requests, batches, steps: what turns a bound model into generated text."""

from inferplane.engine.async_llm import AsyncLLM
from inferplane.engine.llm import LLM
from inferplane.engine.params import SamplingParams
from inferplane.engine.request import Delta, Result, Timings
from inferplane.engine.runner import InferplaneWarning, Runner, RunnerOptions
from inferplane.engine.sources import ModelFiles

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
    "Timings",
]

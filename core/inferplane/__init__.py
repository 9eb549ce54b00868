"""Inferplane runs large language models on any accelerator: `LLM(model, device=...)`.

The names below are imported when they are first used, so that `import inferplane.plugin` stays light.
"""

from __future__ import annotations

TYPE_CHECKING = False
"""As type checkers take it. Importing `typing` would be half the time until a command can answer Ctrl-C."""

if TYPE_CHECKING:
    from typing import Any

    from inferplane.engine import (
        LLM,
        AsyncLLM,
        ChatDelta,
        ChatResult,
        Delta,
        Result,
        SamplingParams,
        SpeculativeConfig,
    )
    from inferplane.errors import InferplaneError

__version__ = "0.2.0.dev0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatDelta",
    "ChatResult",
    "Delta",
    "InferplaneError",
    "Result",
    "SamplingParams",
    "SpeculativeConfig",
    "__version__",
]

_WHERE = {
    "LLM": "inferplane.engine",
    "AsyncLLM": "inferplane.engine",
    "SamplingParams": "inferplane.engine",
    "SpeculativeConfig": "inferplane.engine",
    "Result": "inferplane.engine",
    "Delta": "inferplane.engine",
    "ChatDelta": "inferplane.engine",
    "ChatResult": "inferplane.engine",
    "InferplaneError": "inferplane.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'inferplane' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

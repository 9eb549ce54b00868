"""How a model is bound and loaded, and the warning that says that something could be better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from inferplane.engine.runner.model_files import ModelFiles
from inferplane.errors import InferplaneWarning as InferplaneWarning
from inferplane.errors import UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RunnerOptions:
    """How to bind and load. See `LLM` for the meaning of each."""

    dtype: str | torch.dtype = "auto"
    kv_dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_batch: int = 32
    kv_cache_bytes: int | None = None
    strict: bool = False
    deterministic: bool = False
    ops: Mapping[str, str] = field(default_factory=dict)
    lock: str | None = None
    load_format: str = "auto"
    mtp: bool = False
    copies: float | None = 0.05
    arch: str | None = None
    block_tokens: int | None = None
    eagle: ModelFiles | None = None
    draft: Draft | None = None
    capture: bool = True
    drafts: int = 0
    drafting_layer: bool = False
    ranks: int = 1

    def check(self) -> None:
        """Raise UsageError for what several ranks cannot do together yet."""
        if self.ranks > 1 and (self.mtp or self.eagle is not None):
            raise UsageError(
                f"Drafting with MTP layers or an EAGLE head on {self.ranks} ranks is not implemented.",
                there_is="drafting by n-grams ('inference_with_reference') and by a draft model ('draft_model')",
                remedy="choose one of these, leave speculative and mtp out, or share the model with no other process",
            )


@dataclass(frozen=True)
class Draft:
    """A smaller model that drafts: its files, and how it is bound and loaded, apart from the model it drafts for."""

    files: ModelFiles
    options: RunnerOptions


def pick_dtype(asked: str | torch.dtype, files: ModelFiles) -> torch.dtype:
    """The dtype to compute in: what was asked for, or the checkpoint's own.

    Raises:
        UsageError: an unknown name.
    """
    if isinstance(asked, torch.dtype):
        asked = str(asked).removeprefix("torch.")
    name = asked
    if asked == "auto":
        name = str(files.config.get("dtype") or files.config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UsageError(f"dtype = {name!r}.", there_is=f"auto, {', '.join(DTYPES)}")
    return DTYPES[name]

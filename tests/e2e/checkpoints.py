"""What the tests of checkpoints share: a prompt, logits without a warning, changes in a config."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch

from inferplane import LLM
from inferplane.engine import InferplaneWarning
from tests.e2e.tiny_models import prompts

PROMPT = prompts(101, (40,))


def logits(model: Any, **options: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        with LLM(model, device="cpu", **{"dtype": "float32", **options}) as llm:
            return llm.logits(PROMPT)[0]


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; `...` takes one out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))

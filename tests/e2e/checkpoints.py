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
PROJECTIONS = ("_proj.weight", "_with_mqa.weight", "indexer.wq_b.weight", "indexer.wk.weight")
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def logits(model: Any, **options: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        with LLM(model, device="cpu", **{"dtype": "float32", **options}) as llm:
            return llm.logits(PROMPT)[0]


def edit_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; `...` takes one out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def encode_fp8(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Every projection in FP8 with 128 x 128 blocks; returns the checkpoint and its values, block by block."""
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, t in tensors.items():
        stored[name] = values[name] = t
        if not name.endswith(PROJECTIONS) or name.endswith("indexer.weights_proj.weight") or "layers" not in name:
            continue
        rows, columns = -(-t.shape[0] // 128), -(-t.shape[1] // 128)
        data, value, scale = (
            torch.empty(t.shape, dtype=torch.float8_e4m3fn),
            torch.empty(t.shape),
            torch.empty(rows, columns),
        )
        for i in range(rows):
            for j in range(columns):
                at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                scale[i, j] = t[at].abs().max() / 448 * (1 + 0.1 * i + 0.3 * j)
                data[at] = (t[at] / scale[i, j]).to(torch.float8_e4m3fn)
                value[at] = data[at].float() * scale[i, j]
        stored[name], stored[f"{name}_scale_inv"], values[name] = data, scale, value
    return stored, values

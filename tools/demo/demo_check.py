"""Held-out loss of the demo model, in memory or from its shipped folder."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from demo_data import Dataset, data_hash
from demo_format import load_folder, read_folder, transformers_model
from demo_model import Model, UsageError
from tokenizers import Tokenizer


@torch.no_grad()
def evaluate(
    model: Model, held: list[np.ndarray], context: int, dtype: torch.dtype, limit: int | None = None
) -> dict[str, Any]:
    """Held-out loss: the files as one stream cut in windows of `context` predicted tokens, nothing carried over.

    Gives `loss` (main model), `mtp_loss` (its prediction two ahead), `mtp_acceptance` (how often MTP's best
    token for t + 2 is the main model's best token there, given the true text) and `tokens`.
    """
    stream = np.concatenate(held).astype(np.int64)
    count = (len(stream) - 2) // context
    if limit is not None:
        count = min(count, limit // context)
    if count == 0:
        raise UsageError(f"the held-out part has {len(stream)} tokens, too few for a context of {context}")
    starts = np.linspace(0, len(stream) - 2 - context, count).astype(np.int64) if limit else np.arange(count) * context
    rows = max(1, 2048 // context)  # windows at a time
    was_training = model.training
    model.eval()
    total = ahead_total = 0.0
    agree, compared = 0.0, 0
    for first in range(0, count, rows):
        window = torch.from_numpy(np.stack([stream[s : s + context + 2] for s in starts[first : first + rows]]))
        states = model.states(window[:, :-2], dtype)
        logits = model.logits(states).float()
        total += F.cross_entropy(logits.flatten(0, 1), window[:, 1:-1].flatten(), reduction="sum").item()
        ahead = model.logits(model.mtp_states(window[:, 1:-1], states)).float()
        ahead_total += F.cross_entropy(ahead.flatten(0, 1), window[:, 2:].flatten(), reduction="sum").item()
        # Row i of MTP and row i + 1 of the main model both predict token i + 2.
        agree += (ahead[:, :-1].argmax(-1) == logits[:, 1:].argmax(-1)).sum().item()
        compared += ahead[:, :-1].shape[0] * (context - 1)
    model.train(was_training)
    tokens = count * context
    return {
        "loss": total / tokens,
        "mtp_loss": ahead_total / tokens,
        "mtp_acceptance": agree / compared,
        "tokens": tokens,
    }


def check_folder(folder: Path, with_transformers: bool) -> None:
    """Recompute the held-out loss of an exported folder; compare with its training.json."""
    cfg, model = load_folder(folder)
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    data = Dataset.build(cfg.vocab_size, Tokenizer.from_file(str(folder / "tokenizer.json")))
    if data_hash(data.files) != record["files_sha256"]:
        print(
            f"note: this Python ({platform.python_version()}) has another standard library than the one the model "
            f"was trained on ({record['python']}): the held-out files differ, and so will the loss",
            file=sys.stderr,
        )
    context = record["context"]
    result = evaluate(model, data.held, context, torch.float32)
    result["loss_per_byte"] = result["loss"] * sum(map(len, data.held)) / data.held_bytes
    result["recorded_loss"] = record["held_out"]["exported_fp8_dequantized_float32"]["loss"]
    if with_transformers:
        theirs = transformers_model(*read_folder(folder))
        stream = np.concatenate(data.held).astype(np.int64)
        count, total = (len(stream) - 2) // context, 0.0
        with torch.no_grad():
            for i in range(count):
                window = torch.from_numpy(stream[i * context : i * context + context + 1])
                logits = theirs(window[None, :-1], use_cache=False).logits[0]
                total += F.cross_entropy(logits.float(), window[1:], reduction="sum").item()
        result["loss_transformers"] = total / (count * context)
    print(json.dumps(result, indent=2))

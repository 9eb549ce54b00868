"""A small model with DeepSeek-R1's architecture, prediction layers and a chat template, for a stand-in of the hub."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.e2e.drafters import with_mtp
from tests.e2e.tiny_models import deepseek_config, random_model
from tests.e2e.tiny_tokenizers import byte_level, save

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def write(folder: Path) -> dict[str, bytes]:
    """Write its files to a folder; returns their contents by name."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = save(byte_level(), folder, chat_template=TEMPLATE)
    config = deepseek_config(num_hidden_layers=2, vocab_size=max(vocab, 400))
    random_model(config, seed=3).to(torch.bfloat16).save_pretrained(folder)
    with_mtp(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

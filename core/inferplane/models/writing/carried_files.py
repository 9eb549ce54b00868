"""Files that lie beside a model's weights and that its copies take over."""

from __future__ import annotations

import shutil
from pathlib import Path

from inferplane.models.reading.quant_files import FILES

CARRIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*", "additional_chat_templates/*")
"""Tokenizer, templates, generation config, licences."""
REPLACED = ("config.json", "params.json", *FILES)
"""Files that say how the source was quantized, or what its config is."""


def list_carried(origin: Path | None) -> list[Path]:
    """Tokenizer, templates, generation config and licences in a folder; of no origin nothing."""
    found = sorted(path for pattern in CARRIED for path in origin.glob(pattern)) if origin is not None else ()
    return [path for path in found if path.is_file() and path.name not in REPLACED and ".safetensors" not in path.name]


def carry_files(origin: Path | None, folder: Path) -> None:
    """Copy what `list_carried` lists."""
    for path in list_carried(origin):
        target = folder / path.relative_to(origin)  # type: ignore[arg-type]  # there is one
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)

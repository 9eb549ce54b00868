"""Short names of models: a small list of known ones, which a file of the user's extends."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferplane.errors import UsageError

FILE_VARIABLE = "INFERPLANE_MODELS"
"""Variable that names the user's file; unset: `inferplane/models.yaml` in the folder of the user's settings."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*(?::[a-z0-9][a-z0-9._-]*)?")
_MODEL = re.compile(
    r"(?:(?:hf|huggingface|ms|modelscope):(?://)?)?[\w.-]+/[\w.-]+(?:@[^:@\s]+)?(?::\S+)?|pypi:[\w.-]+(?:==[\w.!+]+)?",
    re.ASCII,
)
SHIPPED_NAMES = ("demo", "demo-draft", "demo-eagle")
"""Models that ship with Inferplane."""
_FIELDS = ("model", "license", "size")


@dataclass(frozen=True)
class ShortName:
    """What a short name stands for.

    Args:
        name: in small letters.
        model: the full name.
        license: by its SPDX name, or as its publisher calls it; empty: unknown.
        size: of the files in words; empty: unknown.
        origin: the file that lists it; empty: it is built in.
    """

    name: str
    model: str
    license: str = ""
    size: str = ""
    origin: str = ""


_QWEN3 = {"0.6b": "1.5 GB", "1.7b": "4.1 GB", "4b": "8 GB", "8b": "16 GB", "14b": "30 GB"}
_SMOLLM2 = {"135m": "270 MB", "360m": "720 MB", "1.7b": "3.4 GB"}
_LLAMA32 = {"1b": "2.5 GB", "3b": "6.4 GB"}
_BUILT_IN = (
    ShortName("smollm2", "hf:HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0", _SMOLLM2["135m"]),
    *(
        ShortName(f"smollm2:{size}", f"hf:HuggingFaceTB/SmolLM2-{size.upper()}-Instruct", "apache-2.0", words)
        for size, words in _SMOLLM2.items()
    ),
    ShortName("smollm3:3b", "hf:HuggingFaceTB/SmolLM3-3B", "apache-2.0", "6.2 GB"),
    *(
        ShortName(f"qwen3:{size}", f"hf:Qwen/Qwen3-{size.upper()}", "apache-2.0", words)
        for size, words in _QWEN3.items()
    ),
    *(
        ShortName(f"llama3.2:{size}", f"hf:meta-llama/Llama-3.2-{size.upper()}-Instruct", "llama3.2 (gated)", words)
        for size, words in _LLAMA32.items()
    ),
    ShortName("llama3.1:8b", "hf:meta-llama/Llama-3.1-8B-Instruct", "llama3.1 (gated)", "16 GB"),
    ShortName("gemma3:270m", "hf:google/gemma-3-270m-it", "gemma (gated)", "540 MB"),
    ShortName("gemma3:1b", "hf:google/gemma-3-1b-it", "gemma (gated)", "2 GB"),
    ShortName("olmo2:1b", "hf:allenai/OLMo-2-0425-1B-Instruct", "apache-2.0", "3 GB"),
    ShortName("phi4-mini", "hf:microsoft/Phi-4-mini-instruct", "mit", "7.7 GB"),
    ShortName("gpt-oss:20b", "hf:openai/gpt-oss-20b", "apache-2.0", "14 GB"),
)
"""Names by family and size, as elsewhere. Sizes follow from the published numbers of parameters, at 2 bytes each, or 4
bits where a model is published so (gpt-oss)."""


def short_names_file() -> Path:
    """The user's list of short names; it need not exist."""
    if given := os.environ.get(FILE_VARIABLE):
        return Path(given).expanduser()
    settings = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(settings).expanduser() / "inferplane" / "models.yaml"


def read_short_names() -> dict[str, ShortName]:
    """All short names, the user's in place of built-in ones.

    Raises:
        UsageError: the user's file cannot be read, or an entry is none.
    """
    path = short_names_file()
    known = {entry.name: entry for entry in _BUILT_IN}
    if not path.is_file():
        if os.environ.get(FILE_VARIABLE):
            raise UsageError(f"{FILE_VARIABLE} names {path}, which is no file.", remedy="correct or unset it")
        return known
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {' '.join(str(error).split())}.", remedy="mend the file") from error
    if data is None:
        return known
    if not isinstance(data, dict):
        raise UsageError(f"{path} is no list of short names.", there_is="lines as `mine: hf:org/name`")
    return known | {entry.name: entry for entry in (_entry(str(name), value, path) for name, value in data.items())}


def _entry(name: str, value: Any, path: Path) -> ShortName:
    """One entry of the user's file: `name: model`, or a mapping with `model`, `license` and `size`."""
    fields = value if isinstance(value, dict) else {"model": value}
    model = fields.get("model")
    if not isinstance(model, str) or _MODEL.fullmatch(model) is None:
        raise UsageError(f"{path}: {name!r} names no model.", there_is="names as hf:org/name, org/name or ms:org/name")
    if name.lower() in SHIPPED_NAMES:
        raise UsageError(f"{path}: {name!r} is a model that ships with Inferplane.", remedy="choose another name")
    if _NAME.fullmatch(name.lower()) is None:
        raise UsageError(f"{path}: {name!r} is no short name.", there_is="letters, digits, dots, dashes, one colon")
    if unknown := [key for key in fields if key not in _FIELDS]:
        raise UsageError(f"{path}: {name!r} has no field {unknown[0]!r}.", there_is=", ".join(_FIELDS))
    return ShortName(
        name.lower(), model, str(fields.get("license") or ""), str(fields.get("size") or ""), origin=str(path)
    )

"""Files of Paddle's own forms, which are not read: what they are, and what to fetch in their place."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from inferplane.errors import CheckpointError, first_of

KINDS = {
    ".pdiparams": "weights for Paddle's own programs",
    ".pdparams": "a pickle of Paddle's, which may run code when opened",
    ".pdmodel": "a program of Paddle's",
}
"""Suffixes of files -> what they are. Weights come first: where there are some, the program does not matter."""
PROGRAM = "model.json"
"""What Paddle 3 calls a program. Other tools have files of this name."""
QUANTIZATIONS = (
    *("weight_only_int4", "weight_only_int8", "a8w8_fp8_wint4", "a8w8c8_fp8", "a8w8_fp8", "a8w8c8", "a8w8"),
    *("wint4", "wint8"),
)
"""Quantizations in names of folders, the longer names first where one holds another."""
OTHER_NAMES = {"wint4": "weight_only_int4", "wint8": "weight_only_int8"}


def refuse_paddle_files(where: str, names: Iterable[str]) -> CheckpointError | None:
    """The error for a model that has Paddle's files and no safetensors; None: it has none of these.

    Args:
        where: the folder, file or repository; a quantization in its name is named as the one to pass.
        names: of its files.

    Source: Paddle's `save_inference_model` and `paddle.save`; PaddleNLP's folders of exported models.
    """
    names = sorted(names)
    found = [(n, kind) for suffix, kind in KINDS.items() for n in names if n.removesuffix(".info").endswith(suffix)]
    if PROGRAM in names and (found or "config.json" not in names):
        found.append((PROGRAM, "what Paddle calls its programs"))
    if not found or any(name.endswith(".safetensors") for name in names):
        return None
    own = where.rstrip("/").rpartition("/")[2].lower().replace("-", "_")
    stated = next((q for q in QUANTIZATIONS if q in own), "")
    passed = (
        f"quantization={OTHER_NAMES.get(stated, stated)!r}" if stated else "quantization='weight_only_int8' or another"
    )
    files, kind = first_of([name for name, _ in found], 3), found[0][1]
    is_file = names == [where.rpartition("/")[2]]
    return CheckpointError(
        f"{where} is {kind}." if is_file else f"{where} has no *.safetensors, but {files}: {kind}.",
        there_is="weights in safetensors, and GGUF files",
        remedy="fetch config.json, tokenizer and model.safetensors (or model.safetensors.index.json and the files that "
        "it names) of the same model, not quantized, from its repository on Hugging Face or ModelScope; "
        f"{passed} quantizes them while they are read, as the export did",
    )


def is_paddle_file(name: str) -> bool:
    """Whether a file, by its name, has one of Paddle's own forms."""
    return name.removesuffix(".info").endswith(tuple(KINDS))


def refuse_paddle_folder(folder: Path) -> CheckpointError | None:
    """`refuse_paddle_files` for a folder, which may be missing."""
    return refuse_paddle_files(str(folder), (p.name for p in folder.iterdir())) if folder.is_dir() else None

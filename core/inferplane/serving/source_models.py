"""The source system's names of models, and what each is here: a repository, a format, a draft, a number of machines.

Its names are folders of exported models, as `deepseek-ai/DeepSeek-R1-MTP-2nodes/weight_only_int8`: no hub has them.
Here a model is quantized while it is read and divided when it starts, so a name says which repository, and how.

Source: https://github.com/PaddlePaddle/PaddleNLP, llm/server/docs/static_models.md, and the table of memory in
"llm/server" of https://paddlenlp.readthedocs.io.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from inferplane.errors import UsageError

DEFAULT_MODEL = "deepseek-ai/DeepSeek-R1/weight_only_int4"
"""What the source system's `download_model.py` fetches without a name."""
DRAFT_FORMATS = {
    "weight_only_int4": "weight_only_int8",
    "weight_only_int8": "weight_only_int8",
    "a8w8_fp8": "a8w8_fp8",
    "a8w8_fp8_wint4": "a8w8_fp8",
}
"""Format of a model -> that of its prediction layers, in the source system's table of mixed precisions."""
DTYPES = ("bfloat16", "float16")


class SourceModel(NamedTuple):
    """What a name of the source system stands for.

    Args:
        name: the source system's.
        repository: on Hugging Face.
        quantization: of the model; None: as the repository has it.
        draft_quantization: of the prediction layers that draft; None: there is no draft.
        nodes: machines that the source system divided the exported folder for.
        dtype: to compute in; None: the repository's.
    """

    name: str
    repository: str
    quantization: str | None = None
    draft_quantization: str | None = None
    nodes: int = 1
    dtype: str | None = None

    @property
    def drafts(self) -> bool:
        """Whether the model's prediction layers draft."""
        return self.draft_quantization is not None


def _list_exported() -> dict[str, SourceModel]:
    found = []
    for base in ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3"):
        for suffix, nodes, formats in (
            ("", 1, ("weight_only_int4", "a8w8_fp8_wint4")),
            ("-2nodes", 2, ("weight_only_int8", "a8w8_fp8")),
        ):
            for name in formats:
                found.append(SourceModel(f"{base}{suffix}/{name}", base, name, None, nodes))
                draft = DRAFT_FORMATS[name]
                found.append(SourceModel(f"{base}-MTP{suffix}/{name}", base, name, draft, nodes))
    for size in ("Qwen-1.5B", "Qwen-7B", "Qwen-14B", "Qwen-32B", "Llama-8B", "Llama-70B"):
        repository = f"deepseek-ai/DeepSeek-R1-Distill-{size}"
        found.append(SourceModel(f"{repository}/weight_only_int8", repository, "weight_only_int8"))
    for repository in ("meta-llama/Meta-Llama-3-8B-Instruct", "Qwen/Qwen2-1.5B-Instruct"):
        for attention, dtype in (("Append", "bfloat16"), ("Block", "float16")):
            found.append(SourceModel(f"{repository}-{attention}-Attn/{dtype}", repository, dtype=dtype))
    for dtype in DTYPES:
        repository = "Qwen/Qwen1.5-0.5B"
        found.append(SourceModel(f"{repository}-Block-Attn/{dtype}", repository, dtype=dtype))
    return {model.name: model for model in found}


EXPORTED = _list_exported()
"""Name of an exported folder -> what it stands for."""
_DRAFTING = ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3")
"""Repositories whose files are in FP8, with prediction layers among them."""
_PUBLISHED = {
    **{f"{base}{suffix}": base for base in _DRAFTING for suffix in ("-FP8", "-MTP", "-MTP-FP8")},
    **{f"meta-llama/Llama-2-{kind}": f"meta-llama/Llama-2-{kind}-hf" for kind in ("7b", "7b-chat", "13b", "13b-chat")},
    **{f"meta-llama/Llama-2-{kind}": f"meta-llama/Llama-2-{kind}-hf" for kind in ("70b", "70b-chat")},
}
PUBLISHED = {name: SourceModel(name, repository) for name, repository in _PUBLISHED.items()}
"""Name of weights in the source system's own hub -> what it stands for."""
_NAME = re.compile(r"[\w.-]+/[\w.-]+/[\w.-]+", re.ASCII)
_VARIANT = re.compile(rf"({'|'.join(_DRAFTING)})-(\d+nodes?|MTP\b.*|FP8\b.*)")


def find_known_model(name: str) -> SourceModel | None:
    """What a known name of the source system stands for; None for any other text."""
    return EXPORTED.get(name) or PUBLISHED.get(name)


def find_source_model(name: str) -> SourceModel | None:
    """What a name of the source system stands for; None for a text that is none of its names, as `hf:ORG/NAME`.

    Raises:
        UsageError: the name has the form of the source system's, and is none that is known.
    """
    plain = name.strip().rstrip("/")
    found = find_known_model(plain)
    if found is None and (_NAME.fullmatch(plain) or _VARIANT.fullmatch(plain)):
        base, _, last = plain.rpartition("/")
        there_is = ", ".join((*EXPORTED, *PUBLISHED))
        remedy = "pass the repository's own name" + (f" and --quantization {last}" if base.count("/") else "")
        raise UsageError(f"{name!r} is no model of the source system.", there_is=there_is, remedy=remedy)
    return found


def model_named(name: str) -> SourceModel:
    """The model that a text stands for: a path that exists, else a name of the source system, else any other name.

    Raises:
        UsageError: as `find_source_model`.
    """
    found = None if Path(name).expanduser().exists() else find_source_model(name)
    return found or SourceModel(name, name)

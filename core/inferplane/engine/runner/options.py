"""How a model is bound and loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from inferplane.engine.request.arguments import resolve_kv_cache_dtype
from inferplane.engine.runner.model_files import ModelFiles
from inferplane.errors import UsageError, warn
from inferplane.renamed import old_names

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SPELLINGS = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
"""Other names of dtypes, in configs and options."""
AS_STORED = "none"
"""`draft_quantization` of drafters whose weights stay in the formats of their files."""
WIDER = {"float64": "float32", "double": "float32"}
"""Dtypes of checkpoints that are computed in another one."""


@old_names(
    {
        "kv_dtype": "kv_cache_dtype",
        "max_batch": "max_num_seqs",
        "copies": "max_repacked_fraction",
        "drafts": "num_drafts",
        "drafting_layer": "has_draft_layer",
    }
)
@dataclass(frozen=True)
class RunnerOptions:
    """How to bind and load one model. `EngineOptions` says what each field means that users set.

    Args, of the others:
        max_repacked_fraction: maximum share of the weights' bytes that may be stored in a second packing; None: any.
        arch: the device architecture to plan for, without the device; None: the device's own.
        block_tokens: required tokens per KV block, for a draft model, which shares block tables; None: any.
        eagle: files of an EAGLE head to load behind the model.
        draft: a draft model.
        num_drafts: maximum number of drafts of a sequence per step.
        has_draft_layer: whether a layer of the model drafts (MTP, EAGLE).
        ranks: number of processes that share the model.
        mtp_files: files of the prediction layers; None: the model's own.
        draft_quantization: scheme by which the weights of layers that draft are quantized while they are read, or
            "none"; None: as `drafters.choose_quantization` says.
        kv_cache_tokens: tokens that the cache holds; None: `kv_cache_bytes` decides.

    Raises:
        UsageError: `quantization` has another KV dtype of its own than `kv_cache_dtype`.
    """

    dtype: str | torch.dtype = "auto"
    kv_cache_dtype: str = "auto"
    index_key_dtype: str = "auto"
    quantization: str | None = None
    head_format: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    kv_cache_bytes: int | None = None
    strict: bool = False
    deterministic: bool = False
    ops: Mapping[str, str] = field(default_factory=dict)
    lock: str | None = None
    load_format: str = "auto"
    mtp: bool = False
    max_repacked_fraction: float | None = 0.05
    arch: str | None = None
    block_tokens: int | None = None
    eagle: ModelFiles | None = None
    draft: Draft | None = None
    capture: bool = True
    num_drafts: int = 0
    has_draft_layer: bool = False
    ranks: int = 1
    mtp_files: ModelFiles | None = None
    draft_quantization: str | None = None
    kv_cache_tokens: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_cache_dtype", resolve_kv_cache_dtype(self.quantization, self.kv_cache_dtype))

    @property
    def has_quantized_index_keys(self) -> bool:
        """Whether the index keys of sparse attention have fewer bits than activations."""
        own = self.index_key_dtype
        return self.kv_cache_dtype != "auto" if own == "auto" else own != "none"

    @property
    def has_own_mtp(self) -> bool:
        """Whether the model is built with its prediction layers, which have its files and its formats."""
        return self.mtp and self.mtp_files is None and self.draft_quantization is None


@dataclass(frozen=True)
class Draft:
    """A draft model's files and its own options."""

    files: ModelFiles
    options: RunnerOptions


def resolve_dtype(requested: str | torch.dtype, files: ModelFiles) -> torch.dtype:
    """The dtype to compute in: the requested one; for "auto" that of the checkpoint's config, or if that names none,
    that of its first tensor; float32 if there are none.

    Warns if most of the tensors have another dtype than the first one, or the checkpoint's dtype is not computed in.

    Raises:
        UsageError: the name is not one of `DTYPES` or `SPELLINGS`.
        CheckpointError: the tensors' files are damaged.
    """
    name = str(requested).removeprefix("torch.")
    if name == "auto":
        stated = files.config.get("dtype") or files.config.get("torch_dtype")
        if stated in (None, "auto"):
            stated = _dtype_of_tensors(files) if files.has_safetensors else None
        name = str(stated or "float32").removeprefix("torch.")
        if name in WIDER:
            warn(f"{files.name} is in {name}, which is not computed in: it is computed in {WIDER[name]}.")
        name = WIDER.get(name, name)
    name = SPELLINGS.get(name, name)
    if name not in DTYPES:
        raise UsageError(f"dtype = {name!r}.", there_is=f"auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _dtype_of_tensors(files: ModelFiles) -> torch.dtype | None:
    """The dtype of a checkpoint whose config names none, chosen as transformers does; warns of a mixture."""
    first, main = files.source().first_dtype(), files.source().main_dtype()
    if first != main:
        warn(
            f"{files.config.name} names no dtype, and most of the tensors are in {str(main).removeprefix('torch.')}: "
            f"that of the first one counts, {str(first).removeprefix('torch.')}, as in transformers. Pass dtype=... to "
            "choose."
        )
    return first

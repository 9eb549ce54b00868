"""Which of a backend's kernels some model can bind: every family, weight format, KV dtype, step kind and feature."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from inferplane.binding import PlanSettings, bind
from inferplane.conformance.configs import TINY
from inferplane.errors import InferplaneError
from inferplane.models import Build, Config, build
from inferplane.ops import FORMATS, CausalLM, Op
from inferplane.quant.online import find_role
from inferplane.quant.schemes import FP8_BLOCKS, FP8_ROWS, FP8_STATIC, INT4_TOKENS, INT8_TOKENS, MXFP4_GROUPS
from inferplane.types import (
    PLAIN,
    ActivationQuant,
    Backend,
    Context,
    Feature,
    Features,
    Kernel,
    KVLayout,
    KVRequest,
    Placement,
)
from tests.vendors.configs import FAMILIES, LLAMA, V3

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REQUESTS: dict[str, tuple[ActivationQuant, ...]] = {
    "fp8_block": (FP8_BLOCKS,),
    "fp8_row": (FP8_ROWS, FP8_STATIC),
    "int8_row": (INT8_TOKENS,),
    **{f: (INT8_TOKENS, INT4_TOKENS) for f in ("int4_group32", "int4_group", "int4_row")},
    "int4_group64": (FP8_BLOCKS, INT8_TOKENS, INT4_TOKENS),
    "mxfp4": (MXFP4_GROUPS,),
}
"""Quantizations of activations that checkpoints and schemes request, by the weights' format."""
QUANTIZED = ("llama", "qwen3_moe", "deepseek_v3", "deepseek_v32", "gpt_oss", "gemma3", "qwen3_5", "mixtral")
"""Families that are tried in every weight format."""
PUBLISHED: tuple[dict[str, Any], ...] = (
    {**LLAMA, "tie_word_embeddings": True},
    {**FAMILIES["deepseek_v2"], "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    {**V3, "num_attention_heads": 128, "num_nextn_predict_layers": 1},
    {**V3, "hidden_size": 512, "moe_intermediate_size": 256, "intermediate_size": 256},
)
"""Forms that published checkpoints have and the small families lack."""
SIZES: tuple[dict[str, Any], ...] = (
    {**FAMILIES["deepseek_v32"], "hidden_size": 1024, "q_lora_rank": 1536},
    {**FAMILIES["deepseek_v32"], "num_attention_heads": 128, "index_topk": 128},
    {
        **{**FAMILIES["glm_moe_dsa"], "hidden_size": 1024, "q_lora_rank": 2048},
        **{"qk_nope_head_dim": 192, "v_head_dim": 256},
    },
)
"""Sizes that some kernels are for, in plain weights."""
ROTATING = ("deepseek_v32", "glm_moe_dsa")
"""Families whose index keys are rotated beside caches of 8 bits."""
ROLES = (("dense", "experts"), ("dense", "experts", "head"), ("dense", "experts", "head", "latent"), ("experts",))
"""Which weights checkpoints and schemes quantize together."""


def list_trees() -> Iterator[CausalLM]:
    """Models of every family: plain, on two ranks, and some with their weights in every format."""
    for name in ROTATING:
        yield from _try_build(FAMILIES[name], rotates_index_keys=True)
    for config in (*FAMILIES.values(), *TINY.values(), *PUBLISHED, *SIZES):
        for placement in (Placement(), Placement.shared(0, 2)):
            yield from _try_build(config, placement=placement)
    for config in (*(FAMILIES[name] for name in QUANTIZED), *PUBLISHED):
        for format, roles in itertools.product(FORMATS, ROLES):
            for quant in (None, *REQUESTS.get(format, ())):
                quants = {} if quant is None else {format: quant}
                rows = frozenset(FORMATS)
                options = {"format_of": _format_of(format, roles), "activation_quants": quants}
                yield from _try_build(config, **options, formats_read_by_row=rows)


def _format_of(format: str, roles: Sequence[str]) -> Callable[[str], str]:
    return lambda name: format if find_role(name) in roles else PLAIN


def _try_build(config: dict[str, Any], **options: Any) -> Iterator[CausalLM]:
    config = {**config, "vocab_size": 256}  # products with few bits take rows in eights, and two ranks halves
    try:
        yield build(Build(Config(config), positions=512, mtp="num_nextn_predict_layers" in config, **options))
    except InferplaneError:  # two ranks do not divide it, or parts of a fused weight differ in format
        return


def distinct_ops(trees: Iterable[CausalLM]) -> dict[str, list[Op]]:
    """Op name -> the ops of that name in the models that differ in their static signature."""
    found: dict[str, dict[object, Op]] = {}
    for tree in trees:
        for _, op in tree.sites():
            found.setdefault(op.name, {}).setdefault(op.key(), op)
    return {name: list(ops.values()) for name, ops in found.items()}


def find_unreached(backend: Backend, kernels: Sequence[Kernel], ops: dict[str, list[Op]]) -> list[Kernel]:
    """Kernels that accept no op of the models; those that run their children themselves, that no plan has.

    A kernel that computes in fewer bits than every op and checkpoint request counts only if it quantizes no
    activations, so that a pin alone takes it.
    """
    every = {name for k in kernels for name in k.when.features}
    features = Features({name: Feature(True, "assumed") for name in (*every, "bf16", "fp16")})
    left = [k for k in kernels if not k.inlines and not _accepts(backend, k, ops.get(k.op, ()), features)]
    inlining = [k for k in kernels if k.inlines]
    return [*left, *(_not_chosen(backend, kernels, inlining) if inlining else ())]


def find_unknown_features(backend: Backend, kernels: Sequence[Kernel]) -> set[str]:
    """Features that kernels need and no architecture of the backend has or lacks."""
    known = set().union(*(backend.features(arch) for arch in (None, *backend.architectures)))
    return {name for k in kernels for name in k.when.features} - known


def _accepts(backend: Backend, kernel: Kernel, ops: Iterable[Op], features: Features) -> bool:
    for op in ops:
        if kernel.quantizes_activations_to and kernel.is_less_precise_than(op):
            continue
        for dtype in kernel.when.dtypes or DTYPES:
            for layouts in _layouts(backend, op, dtype):
                for kind in kernel.when.step_kinds or ("mixed",):
                    if not kernel.refusals(op, Context(dtype, kind, layouts, features), op.formats()):
                        return True
    return False


def _layouts(backend: Backend, op: Op, dtype: torch.dtype) -> Iterator[dict[KVRequest, KVLayout]]:
    requests = op.kv_requests()
    for combination in itertools.product(*(backend.kv_layouts(r, dtype) for r in requests)):
        yield dict(zip(requests, combination))


def _not_chosen(backend: Backend, kernels: Sequence[Kernel], wanted: Sequence[Kernel]) -> list[Kernel]:
    """Those of some kernels that no plan of a small model has, on what an architecture is assumed to have."""
    left = dict.fromkeys(wanted)
    for config, arch in itertools.product((*TINY.values(), *FAMILIES.values()), backend.architectures):
        for tree in _try_build(config):
            settings = PlanSettings(backend.name, torch.bfloat16, arch, backend.features(arch), assumed=True)
            plan = bind(
                tree, kernels, settings,
                lambda r: [x for x in backend.kv_layouts(r, torch.bfloat16) if x.kv_dtype == "auto"],
            )  # fmt: skip
            for _, _, _, choice in plan.distinct():
                if choice.kernel is not None:
                    left.pop(choice.kernel, None)
        if not left:
            break
    return list(left)

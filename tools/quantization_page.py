"""The page docs/quantization-matrix.md: what each device does with each quantization and KV dtype, from its plans."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from inferplane.conformance.configs import SLICES
from inferplane.engine import ModelFiles, Runner, RunnerOptions
from inferplane.engine.request.arguments import QUANTIZATIONS
from inferplane.errors import UsageError
from inferplane.models import Config
from inferplane.plugins import PluginHost
from inferplane.types import PLAIN, Weight

MODELS = {"Llama-3.1-8B": "llama_8b_two_layers", "DeepSeek-V3": "deepseek_v3_two_layers"}
"""Models at their true sizes; two layers decide as all do."""
MORE_ARCHS = (("npu", "950"),)
"""Architectures beside each device's first one."""
CACHES = ("auto", "int8", "fp8")
FORMS = {"int8": "weights in int8", "int4": "weights in int4", "fp8": "weights in FP8"}
FORMS |= {"mxfp4": "weights in MXFP4", "nvfp4": "weights in NVFP4"}
NATIVE, WEIGHTS_ONLY, EXPANDED, ON_TORCH, REFUSED = "n", "w", "e", "t", "-"

INTRO = """# Quantizations by device

For each value of `quantization` and of `kv_cache_dtype` what `explain` says of a model in bfloat16, on the device's
first architecture or the one that is named. The three letters of a cell are those of a KV cache in the model's dtype,
in int8 and in fp8; c8 in a name decides the KV cache, so there is one letter.
[Python](python.md#quantized-weights) says what each name quantizes.

- **n**: native. Every weight that the quantization quantizes stays so, activations are quantized where the name says
  so, and attention reads the cache by a kernel.
- **w**: as n, but some or all activations stay as they are: no kernel of the device quantizes them.
- **e**: weights of some op are expanded at load, because no kernel of that op reads any of the quantization's forms.
- **t**: attention runs on torch's operators, because no kernel of the device reads that KV dtype. Where weights are
  expanded too, the letter is e.
- **-**: refused. The device has no KV cache in that dtype.

Below each table stands why, for every letter but n: the operator that the vendor does not have, or that is not
bound; and where a cache has [static scales](quantization.md#static-scales-of-the-kv-cache).

"""

NO_KERNEL = "the backend declares no kernel for it"
"""Of devices without reasons, which are new."""
_STATIC_FP8 = "one scale a layer, the checkpoint's or 1"
_NO_FP8 = "the chip has no FP8 product"
_DCU_INT4_EXPERTS = (
    "of lightop's moe_gemm_marlin_w4a16 the name alone is published; AITER's form of it (aiter-das, "
    "moe_c_moe_gemm_marlin_w4a16) reads weights in an order that its page does not name, and is not bound"
)
_DCU_FP8 = "the vendor's FP8 products are built for gfx938 alone (vllm-plugin-das), and are not bound"
_DCU_INT8 = "lightop multiplies int8 by int8 alone (hipblaslt_w8a8_gemm): that is `a8w8`"
_DCU_INT4 = (
    "lightop's gemm_awq_w4a16_marlin, which vllm-plugin-das publishes with its repacking (lightop_autoawq.py), is "
    "taken there in float16, in groups of 128 with zero points, for sixteen sizes, of which this model has none"
)
_KUNLUN_INT8 = "kunlun_ops.matmul multiplies int8 by int8 alone: that is `a8w8`"
_KUNLUN_INT4 = "kunlun_ops.awq_gemm computes in float16 alone: with `dtype` float16 it is bound"
_KUNLUN_CACHE = "the call forms of kunlun_ops' cache writes and attention have no scales"
_CPU_FP8 = "of x86's units AMX-FP8 alone multiplies FP8 by FP8, and no kernel here uses it"
_INTEL_FP8 = "cutlass_grouped_gemm_interface has an argument for the scales of activations in FP8 and does not read it"
_NO_FP4 = "no product of 16 bits with weights in FP4 is bound"
_CUDA_4 = "the backend's kernels quantize activations to FP8 and int8, and multiply int4 by FP8 (`a8w8_fp8_wint4`)"
_GCU_4 = (
    "of vllm-gcu's products with int4, experts alone take activations of 8 bits, in FP8 (fused_moe_quant_kernel_ex)"
)
_NPU_4 = "no form of npu_quant_matmul with int4 is bound"
_NPU_4_EXPERTS = "no form of npu_grouped_matmul with int4 beside activations of 4 or 8 bits is bound"
_INTEL_4 = "no product with activations of 4 bits is bound"
REASONS: Mapping[tuple[str, str, str], str] = {
    ("npu", "linear", "fp8"): "npu_quant_matmul takes FP8 on the 950 alone",
    ("npu", "moe_experts", "fp8"): "npu_grouped_matmul takes FP8 on the 950 alone",
    (
        "npu",
        "mla",
        "int8",
    ): "the page of npu_fused_infer_attention_score_v2 (op-plugin at 083ab3d2) admits int8 latents "
    "with one scale a layer beside int8 queries, and excludes int8 queries again, beside int8 keys for one query token "
    "and over blocks for more; it gives no shapes of the three scales",
    (
        "npu",
        "cache",
        "fp8",
    ): "the page of npu_fused_infer_attention_score names caches in int8 and, on the 950, int4, none "
    "in FP8 (op-plugin at 09fca6f6)",
    (
        "npu",
        "moe_experts",
        "activations fp8 beside int4",
    ): "of npu_grouped_matmul's forms FP8 by FP8 is bound, none with int4 beside FP8",
    **{
        (device, op, f"activations {left} beside int4"): reason
        for device, op, reason in (
            ("cuda", "linear", _CUDA_4),
            ("cuda", "moe_experts", _CUDA_4),
            ("gcu", "linear", _GCU_4),
            ("gcu", "moe_experts", _GCU_4),
            ("npu", "linear", _NPU_4),
            ("npu", "moe_experts", _NPU_4_EXPERTS),
            ("xpu:intel", "moe_experts", _INTEL_FP8),
        )
        for left in ("int4", "int8")
    },
    ("cuda", "linear", "activations mxfp4 beside mxfp4"): _CUDA_4,
    ("cuda", "moe_experts", "activations mxfp4 beside mxfp4"): _CUDA_4,
    ("xpu:intel", "linear", "activations int4 beside int4"): _INTEL_4,
    (
        "xpu:intel",
        "linear",
        "activations int8 beside int4",
    ): "int4_gemm_w4a8 (vllm-xpu-kernels at 4543b58) is not bound",
    ("cpu", "linear", "activations fp8 beside fp8"): _CPU_FP8,
    ("cpu", "moe_experts", "activations fp8 beside fp8"): _CPU_FP8,
    ("cpu", "moe_experts", "activations fp8 beside int4"): _CPU_FP8,
    ("xpu:intel", "linear", "activations int8 beside int8"): "the extension has no product of int8 by int8; torch's "
    "_int_mm with scales behind it is not bound",
    ("xpu:intel", "moe_experts", "activations fp8 beside fp8"): _INTEL_FP8,
    ("xpu:intel", "moe_experts", "activations fp8 beside int4"): _INTEL_FP8,
    ("dcu", "linear", "int8"): _DCU_INT8,
    ("dcu", "lm_head", "int8"): _DCU_INT8,
    ("dcu", "moe_experts", "int8"): "lightop's moe_gemm_marlin_w8a8 multiplies int8 by int8 alone: that is `a8w8`",
    ("dcu", "linear", "int4"): _DCU_INT4,
    ("dcu", "moe_experts", "int4"): _DCU_INT4_EXPERTS,
    ("dcu", "linear", "fp8"): _DCU_FP8,
    ("dcu", "moe_experts", "fp8"): _DCU_FP8,
    ("dcu", "cache", "fp8"): "flash_attn reads K and V in E4M3 on gfx938 alone (vllm-plugin-das, "
    "get_fp8_dtype_for_flashattn); latents in FP8 are bound",
    ("gcu", "linear", "fp8"): _NO_FP8 + " before generation 4",
    ("gcu", "moe_experts", "fp8"): _NO_FP8 + " before generation 4",
    ("gcu", "static", "int8"): "this is for a checkpoint with static scales, which reshape_and_cache and "
    "paged_attention_v1 take as numbers of the host (vllm-gcu at 7b5aaca9); without them it is t, by a scale a token",
    ("xpu:intel", "static", "fp8"): _STATIC_FP8,
    ("dcu", "static", "fp8"): _STATIC_FP8,
    ("gcu", "mla", "int8"): "fwd_kvcache_mla's published schema names scales of FP8 alone",
    ("gcu", "cache", "fp8"): _NO_FP8 + " before generation 4",
    ("xpu:intel", "moe_experts", "int8"): "cutlass_grouped_gemm_interface takes 16 bits, FP8, int4 and MXFP4, no int8",
    ("xpu:intel", "attention", "int8"): "the extension's cache writes know 16 bits and FP8, no int8",
    ("xpu:intel", "mla", "int8"): "the extension's cache writes know 16 bits and FP8, no int8",
    ("xpu:kunlun", "linear", "int8"): _KUNLUN_INT8,
    ("xpu:kunlun", "lm_head", "int8"): _KUNLUN_INT8,
    ("xpu:kunlun", "moe_experts", "int8"): "kunlun_ops.moe_fc multiplies int8 by int8 alone: that is `a8w8`",
    ("xpu:kunlun", "linear", "int4"): _KUNLUN_INT4,
    ("xpu:kunlun", "moe_experts", "int4"): "kunlun_ops.moe_fc's int4 form (use_pack_int4) is described nowhere",
    ("xpu:kunlun", "linear", "fp8"): _NO_FP8,
    ("xpu:kunlun", "moe_experts", "fp8"): _NO_FP8,
    ("xpu:kunlun", "attention", "int8"): _KUNLUN_CACHE,
    ("xpu:kunlun", "mla", "int8"): _KUNLUN_CACHE,
    ("xpu:kunlun", "cache", "fp8"): _NO_FP8,
    ("xpu:intel", "linear", "mxfp4"): "fp4_gemm multiplies MXFP4 by MXFP4 alone (`a4w4_mxfp4`), and is not bound",
    ("xpu:intel", "linear", "nvfp4"): _NO_FP4,
    ("xpu:intel", "moe_experts", "mxfp4"): "cutlass_grouped_gemm_interface's MXFP4 form is not bound",
    ("xpu:intel", "moe_experts", "nvfp4"): _NO_FP4,
    **{
        (device, op, form): _NO_FP4
        for device in ("dcu", "gcu", "npu", "xpu:kunlun")
        for op in ("linear", "moe_experts")
        for form in ("mxfp4", "nvfp4")
    },
}
"""Device, op (or "cache" where the device has no such KV dtype, "static" where static scales are read) and form (or
"activations A beside W") -> why no kernel of the op reads the form or quantizes activations so, or what it takes."""


def page(host: PluginHost) -> str:
    """The page.

    Raises:
        SystemExit: a letter without a reason in `REASONS`, or a reason that belongs to none.
    """
    devices = [(d.name, next(iter(host.backend_for_explain(d.name).architectures), "")) for d in host.devices()]
    devices = sorted([*devices, *MORE_ARCHS])
    out, used = [INTRO], set()
    for title, config in MODELS.items():
        out += [f"## {title}\n", "| device | " + " | ".join(f"`{name}`" for name in QUANTIZATIONS) + " |"]
        out.append("|---|" + "---|" * len(QUANTIZATIONS))
        needed: dict[tuple[str, str, str], None] = {}
        for device, arch in devices:
            cells = []
            for name, own in QUANTIZATIONS.items():
                caches = CACHES if own == "auto" else (own,)
                found = [judge(host, device, arch, SLICES[config], name, cache) for cache in caches]
                cells.append("".join(letter for letter, _ in found))
                for _, keys in found:
                    needed.update(dict.fromkeys(keys))
            out.append(f"| {device} ({arch}) | " + " | ".join(cells) + " |")
        out += ["", *list(explain(needed)), ""]
        used |= needed.keys()
    if stale := set(REASONS) - used:
        raise SystemExit(f"tools/quantization_page.py: no cell needs the reasons for {sorted(stale)}")
    return "\n".join(out).rstrip() + "\n"


def judge(
    host: PluginHost, device: str, arch: str, config: dict[str, Any], name: str, cache: str
) -> tuple[str, set[tuple[str, str, str]]]:
    """A cell's letter, and what it needs reasons for: device, op and form."""
    options = RunnerOptions(dtype="bfloat16", quantization=name, kv_cache_dtype=cache, arch=arch, load_format="dummy")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = Runner.plan_only(ModelFiles(Config(dict(config), "model")), host, device, options).plan
    except UsageError as refused:
        if "kv_cache_dtype" not in refused.what:
            raise
        return REFUSED, {(device, "cache", cache)}
    static = {(device, "static", cache) for layout in plan.layouts.values() if layout.has_static_scales}
    expanded = {(device, op, _form(format)) for op, format in plan.dequantized}
    torch_ops = {(device, _attention(op.name), cache) for _, _, op, _ in plan.unread_caches()}
    if expanded or torch_ops:
        return EXPANDED if expanded else ON_TORCH, expanded | torch_ops | static
    skipped = {key for _, _, op, choice in plan.distinct() if choice.activation_quant_skipped for key in _skipped(op)}
    return WEIGHTS_ONLY if skipped else NATIVE, static | {(device, *key) for key in skipped}


def _skipped(op: Any) -> Iterator[tuple[str, str]]:
    """Each product in a site whose activations stay as they are, with the formats of both sides."""
    for _, part in op.sites():
        for _, weight in part.items():
            if isinstance(weight, Weight) and weight.format != PLAIN and weight.activation_quant is not None:
                yield part.name, f"activations {weight.activation_quant.format} beside {_form(weight.format)}"


def _form(format: str) -> str:
    return next(form for form in FORMS if format.startswith(form))


def _attention(op: str) -> str:
    return "mla" if op.startswith("mla") else op


def explain(needed: Mapping[tuple[str, str, str], None]) -> Iterator[str]:
    """A line for each reason, in the order of devices."""
    for device, op, form in sorted(needed):
        if (device, op, form) not in REASONS and device in {known for known, _, _ in REASONS}:
            raise SystemExit(f"tools/quantization_page.py: REASONS lacks {(device, op, form)}")
        yield f"- {device}, {_describe(op, form)}: {REASONS.get((device, op, form), NO_KERNEL)}."


def _describe(op: str, form: str) -> str:
    """What stays expanded, on torch, refused, or without quantized activations."""
    if form.startswith("activations"):
        _, left, _, right = form.split()
        return f"{op}, activations in {FORMS[left].removeprefix('weights in ')} beside {FORMS[right]}"
    if op in ("linear", "lm_head", "moe_experts"):
        return f"{op}, {FORMS[form]}"
    more = {"mla": " of latents", "static": ", static scales"}.get(op, "")
    return f"KV cache in {form}{more}"

"""What the series of Ascend chips can do, as features that kernels ask for, each with its source.

The vendor's pages of operators (Ascend/op-plugin at 517f2e7d, docs/zh/custom_APIs) begin with a table of products. The
950's column was added to few of them; where it is missing, vllm-ascend at 182b75ea decides, which calls the operator on
that series or does not.
"""

from __future__ import annotations

from inferplane.plugin import Feature, Features

_CUBE = "the cube unit computes in it (CANN operator documents)"
_LISTED = "its pages list this series (op-plugin, docs/zh/custom_APIs)"
_CALLED = "not in its pages' lists, but vllm-ascend calls it on this series (device_op.py)"
_A5 = "FP8 operators are for the 950 series alone (CANN operator documents)"
_INT8_950 = "op-plugin's tests multiply int8 by int8 there (test_npu_quant_matmul.py, Ascend950)"
_NOT_310P = "its pages list Atlas A2 and A3 only (op-plugin, docs/zh/custom_APIs)"
_NOT_310P_950 = "its pages list Atlas A2, A3 and the 950 only (op-plugin, docs/zh/custom_APIs)"
_ATTENTION_310P = "vllm-ascend's attention there reads ATB's NZ cache (_310p/attention/attention_v1.py)"
_ROTARY_310P = "page of npu_rotary_mul: on that series halves of 128 entries only, in four dimensions"
_A2_A3_LISTED = "its page lists Atlas A2 and A3, and neither lists nor denies this series (op-plugin)"
_BF16_STATES = "page of npu_chunk_gated_delta_rule: states in float32 on the 950 alone"
_NO_RECURRENT = "the page of npu_recurrent_gated_delta_rule lists Atlas A2 and A3 only"
_NO_CONVOLUTION = "the page of npu_fused_causal_conv1d lists the 950 only"
_HALF_INDEX_WEIGHTS = "page of npu_lightning_indexer: no weights in float32 on the 950"
_NO_INT8_ROTATION = "page of npu_rotate_quant: no int8 on the 950"
_950_ALONE = "the pages of npu_mhc_pre, npu_mhc_sinkhorn and npu_mhc_post list the 950 only"
_ATTENTION = "fused attention reads K and V in ND there (page of npu_fused_infer_attention_score)"

_A2_A3 = {
    "fp16": Feature(True, _CUBE),
    "bf16": Feature(True, _CUBE),
    "int8-dot": Feature(True, _CUBE),
    "fused-infer": Feature(True, _LISTED),
    "rotary-ragged": Feature(True, _LISTED),
    "atb": Feature(True, "assumed: NNAL is installed beside CANN"),
    "sinks": Feature(True, _LISTED),
    "clipped-swiglu": Feature(True, _LISTED),
    "recurrent-delta-rule": Feature(True, _LISTED),
    "chunked-delta-rule-float32": Feature(False, _BF16_STATES),
    "causal-conv1d": Feature(False, _NO_CONVOLUTION),
    "sparse-attention": Feature(True, _LISTED),
    "sparse-attention-int8": Feature(True, _LISTED),
    "float32-index-weights": Feature(True, _LISTED),
    "rotate-quant-int8": Feature(True, _LISTED),
    "mla-prolog": Feature(True, _LISTED),
    "hyper-connections": Feature(False, _950_ALONE),
    "nz-cache": Feature(False, _ATTENTION),
    "nz-plain-weights": Feature(
        False, "ND is the default for plain weights; NZ is for quantized ones (vllm-ascend utils.py)"
    ),
}

SERIES: dict[str, dict[str, Feature]] = {
    "910b": _A2_A3,
    "910_93": _A2_A3,
    "310p": {
        "fp16": Feature(True, _CUBE),
        "bf16": Feature(False, "several operators refuse bfloat16 on the 310P (CANN operator documents); use float16"),
        "int8-dot": Feature(True, _CUBE),
        "fused-infer": Feature(False, _NOT_310P),
        "rotary-ragged": Feature(False, _ROTARY_310P),
        "atb": Feature(True, "assumed: NNAL is installed beside CANN"),
        "sinks": Feature(False, _NOT_310P),
        "clipped-swiglu": Feature(False, _NOT_310P),
        "recurrent-delta-rule": Feature(False, _NO_RECURRENT),
        "chunked-delta-rule-float32": Feature(False, _BF16_STATES),
        "causal-conv1d": Feature(False, _NO_CONVOLUTION),
        "sparse-attention": Feature(False, _NOT_310P_950),
        "sparse-attention-int8": Feature(False, _NOT_310P_950),
        "float32-index-weights": Feature(False, _NOT_310P_950),
        "rotate-quant-int8": Feature(False, _NOT_310P_950),
        "mla-prolog": Feature(False, _NOT_310P_950),
        "hyper-connections": Feature(False, _950_ALONE),
        "nz-cache": Feature(True, _ATTENTION_310P),
        "nz-plain-weights": Feature(True, "weights are in NZ there (vllm-ascend hardware_profile.py, FORCE_NZ)"),
    },
    "950": {
        "fp16": Feature(True, _CUBE),
        "bf16": Feature(True, _CUBE),
        "int8-dot": Feature(True, _INT8_950),
        "fp8": Feature(True, _A5),
        "fused-infer": Feature(True, _CALLED),
        "rotary-ragged": Feature(
            True, "not in its page's list, but vllm-ascend calls it whatever the series (sfa_v1.py)"
        ),
        "atb": Feature(None, "no source that we read says so or denies it"),
        "sinks": Feature(None, _A2_A3_LISTED),
        "clipped-swiglu": Feature(None, _A2_A3_LISTED),
        "recurrent-delta-rule": Feature(False, _NO_RECURRENT),
        "chunked-delta-rule-float32": Feature(True, _LISTED),
        "causal-conv1d": Feature(True, _LISTED),
        "sparse-attention": Feature(True, _LISTED),
        "sparse-attention-int8": Feature(True, _LISTED),
        "float32-index-weights": Feature(False, _HALF_INDEX_WEIGHTS),
        "rotate-quant-int8": Feature(False, _NO_INT8_ROTATION),
        "mla-prolog": Feature(True, _LISTED),
        "hyper-connections": Feature(True, _LISTED),
        "nz-cache": Feature(False, _ATTENTION),
        "nz-plain-weights": Feature(
            False, "a tensor in NZ can neither be viewed nor sliced there (page of npu_format_cast)"
        ),
    },
}
"""Series -> features. 910b is Atlas A2, 910_93 is Atlas A3, 950 is A5.

"fused-infer": the fused operators of inference (attention with a paged cache, cache writes, gating, dynamic
quantization). "rotary-ragged": npu_rotary_mul takes `[T, H, D]`, both pairings and any even width
below 896. "chunked-delta-rule-float32": with states in float32; "float32-index-weights": with weights in float32;
"rotate-quant-int8": into int8. `OPERATORS` names what these and others call. "atb": ATB's operators, which need
NNAL. "nz-cache": attention reads an NZ cache. "nz-plain-weights": plain weights are kept in NZ.
"""

OPERATORS: dict[str, tuple[str, ...]] = {
    "sinks": ("npu_fused_infer_attention_score_v2",),
    "clipped-swiglu": ("npu_clipped_swiglu",),
    "recurrent-delta-rule": ("npu_recurrent_gated_delta_rule", "npu_chunk_gated_delta_rule"),
    "chunked-delta-rule-float32": ("npu_chunk_gated_delta_rule",),
    "causal-conv1d": ("npu_fused_causal_conv1d", "npu_fused_causal_conv1d_v2"),
    "sparse-attention": ("npu_lightning_indexer", "npu_sparse_flash_attention"),
    "sparse-attention-int8": ("npu_quant_lightning_indexer", "npu_kv_quant_sparse_flash_attention"),
    "float32-index-weights": ("npu_lightning_indexer",),
    "rotate-quant-int8": ("npu_rotate_quant",),
    "mla-prolog": ("npu_mla_prolog_v3",),
    "hyper-connections": ("npu_mhc_pre", "npu_mhc_sinkhorn", "npu_mhc_post"),
}
"""Feature -> the operators of torch_npu that it stands for, which older releases lack."""


def features_of(arch: str) -> Features:
    """What a series can do; a series that is not in the table is unknown in everything."""
    known = SERIES.get(arch, {})
    return Features({"fp8": Feature(False, _A5), **known} if known else {})


def arch_of(name: str) -> str:
    """The series of a device by the name that torch_npu gives it: "Ascend910B3" is "910b".

    A name of no known series is its own architecture. Source: SoC names in CANN's platform_config folder; the 950
    series was called 910_95 in early releases.
    """
    short = name.lower().removeprefix("ascend")
    for prefix, arch in (("910_95", "950"), ("950", "950"), ("910_93", "910_93"), ("910b", "910b"), ("310p", "310p")):
        if short.startswith(prefix):
            return arch
    return short

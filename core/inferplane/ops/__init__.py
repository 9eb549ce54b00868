"""The operations models are written in. One place answers "what must this kernel compute?"."""

from inferplane.ops.attention import Attention, GQABlock, NormRopeWrite, each_range, mask_pairs
from inferplane.ops.basic import AddRMSNorm, Embedding, RMSNorm, Rope
from inferplane.ops.clamped_experts import ClampedExperts, clamp_gate
from inferplane.ops.collective import AllGather, AllReduce
from inferplane.ops.compressed.attention import CompressedAttention, SharedKVAttention, attend_with_sinks
from inferplane.ops.compressed.block import CompressedBlock, SharedKVBlock
from inferplane.ops.compressed.compressor import (
    CompressAndWrite,
    Compressor,
    CompressorDims,
    CompressRows,
    compress,
    list_lasts,
)
from inferplane.ops.compressed.indexer import CompressedIndexer
from inferplane.ops.compressed.output import GroupedLinear
from inferplane.ops.compressed.rotation import EntryWrite, SharedKVNormRopeWrite, TailRope, weightless_norm
from inferplane.ops.draw import Draw
from inferplane.ops.eagle import Eagle3Layer, EagleLayer
from inferplane.ops.formats import FORMATS, dequantize_rows, encode
from inferplane.ops.forms.activation import Activation, ActivationMul
from inferplane.ops.forms.hybrid import HybridBlock
from inferplane.ops.forms.layers import BlockLayer, ParallelLayer, ResidualLayer
from inferplane.ops.forms.mlp import MLP
from inferplane.ops.forms.norms import AddNorm, LayerNorm, WidthRMSNorm
from inferplane.ops.forms.rotated_activation import RotatedActivation, make_hadamard, rotate_blocks
from inferplane.ops.forms.rotation import PartialRope, PrepareAttention
from inferplane.ops.forms.scaled import ScaledEmbedding, ScaledHead
from inferplane.ops.forms.shortcut import ShortcutLayer
from inferplane.ops.hash_moe import HashMoE, HashRoute
from inferplane.ops.hyper.connections import HyperCollapse, HyperHead, HyperPost, HyperPre, Sinkhorn
from inferplane.ops.hyper.layer import HyperLayer, HyperNorm, StreamEmbedding
from inferplane.ops.hyper.prediction import HyperMTPLayer
from inferplane.ops.kv_write import KVWrite
from inferplane.ops.linear import GatedMLP, Linear, LMHead, SiluMul
from inferplane.ops.mla import MLAAbsorbed, MLABlock, MLADims, MLAExpanded, MLAKVWrite, MLANormRopeWrite
from inferplane.ops.model import CausalLM, DecoderLayer, DecoderStack, MTPLayer
from inferplane.ops.moe import MoE, MoEExperts, MoERoute
from inferplane.ops.op import EXTENSIONS, OPS, Comparison, Cost, Op, Sample, Workload, extension, placeholder, values
from inferplane.ops.quantize import Quantize
from inferplane.ops.recurrent.block import RecurrentBlock
from inferplane.ops.recurrent.conv import CausalConv1d
from inferplane.ops.recurrent.delta_rule import DeltaRuleGates, GatedDeltaRule
from inferplane.ops.recurrent.kimi_delta import KimiDeltaAttention
from inferplane.ops.recurrent.mixers import GatedDeltaNet, Mamba2Mixer, ShortConv
from inferplane.ops.recurrent.norm import GatedRMSNorm, SiluGate
from inferplane.ops.recurrent.scan import SelectiveScan
from inferplane.ops.sampling import SampleTokens
from inferplane.ops.sparse.attention import SparseMLAAbsorbed, SparseMLABlock, SparseMLAExpanded, hide_others
from inferplane.ops.sparse.indexer import (
    IndexDims,
    IndexKeyWrite,
    IndexSelect,
    LightningIndexer,
    RotateIndexKeys,
    choose_positions,
    mask_entries,
)

__all__ = [
    "EXTENSIONS",
    "FORMATS",
    "MLP",
    "OPS",
    "Activation",
    "ActivationMul",
    "AddNorm",
    "AddRMSNorm",
    "AllGather",
    "AllReduce",
    "Attention",
    "BlockLayer",
    "CausalConv1d",
    "CausalLM",
    "ClampedExperts",
    "Comparison",
    "CompressAndWrite",
    "CompressRows",
    "CompressedAttention",
    "CompressedBlock",
    "CompressedIndexer",
    "Compressor",
    "CompressorDims",
    "Cost",
    "DecoderLayer",
    "DecoderStack",
    "DeltaRuleGates",
    "Draw",
    "Eagle3Layer",
    "EagleLayer",
    "Embedding",
    "EntryWrite",
    "GQABlock",
    "GatedDeltaNet",
    "GatedDeltaRule",
    "GatedMLP",
    "GatedRMSNorm",
    "GroupedLinear",
    "HashMoE",
    "HashRoute",
    "HybridBlock",
    "HyperCollapse",
    "HyperHead",
    "HyperLayer",
    "HyperMTPLayer",
    "HyperNorm",
    "HyperPost",
    "HyperPre",
    "IndexDims",
    "IndexKeyWrite",
    "IndexSelect",
    "KVWrite",
    "KimiDeltaAttention",
    "LMHead",
    "LayerNorm",
    "LightningIndexer",
    "Linear",
    "MLAAbsorbed",
    "MLABlock",
    "MLADims",
    "MLAExpanded",
    "MLAKVWrite",
    "MLANormRopeWrite",
    "MTPLayer",
    "Mamba2Mixer",
    "MoE",
    "MoEExperts",
    "MoERoute",
    "NormRopeWrite",
    "Op",
    "ParallelLayer",
    "PartialRope",
    "PrepareAttention",
    "Quantize",
    "RMSNorm",
    "RecurrentBlock",
    "ResidualLayer",
    "Rope",
    "RotateIndexKeys",
    "RotatedActivation",
    "Sample",
    "SampleTokens",
    "ScaledEmbedding",
    "ScaledHead",
    "SelectiveScan",
    "SharedKVAttention",
    "SharedKVBlock",
    "SharedKVNormRopeWrite",
    "ShortConv",
    "ShortcutLayer",
    "SiluGate",
    "SiluMul",
    "Sinkhorn",
    "SparseMLAAbsorbed",
    "SparseMLABlock",
    "SparseMLAExpanded",
    "StreamEmbedding",
    "TailRope",
    "WidthRMSNorm",
    "Workload",
    "attend_with_sinks",
    "choose_positions",
    "clamp_gate",
    "compress",
    "dequantize_rows",
    "each_range",
    "encode",
    "extension",
    "hide_others",
    "list_lasts",
    "make_hadamard",
    "mask_entries",
    "mask_pairs",
    "placeholder",
    "rotate_blocks",
    "values",
    "weightless_norm",
]

"""The operations models are written in. One place answers "what must this kernel compute?"."""

from inferplane.ops.attention import Attention, GQABlock, KVWrite, NormRopeWrite, each_range, hidden_pairs
from inferplane.ops.basic import AddRMSNorm, Embedding, RMSNorm, Rope
from inferplane.ops.collective import AllGather, AllReduce
from inferplane.ops.draw import Draw
from inferplane.ops.formats import FORMATS, dequantize_rows, encode
from inferplane.ops.linear import GatedMLP, Linear, LMHead, SiluMul
from inferplane.ops.mla import MLAAbsorbed, MLABlock, MLADims, MLAExpanded, MLAKVWrite, MLANormRopeWrite
from inferplane.ops.model import CausalLM, DecoderLayer, DecoderStack, EagleLayer, MTPLayer
from inferplane.ops.moe import MoE, MoEExperts, MoERoute
from inferplane.ops.op import OPS, Comparison, Cost, Op, Sample, Workload, placeholder, values
from inferplane.ops.quantize import Quantize
from inferplane.ops.sampling import SampleTokens

__all__ = [
    "FORMATS",
    "OPS",
    "AddRMSNorm",
    "AllGather",
    "AllReduce",
    "Attention",
    "CausalLM",
    "Comparison",
    "Cost",
    "DecoderLayer",
    "DecoderStack",
    "Draw",
    "EagleLayer",
    "Embedding",
    "GQABlock",
    "GatedMLP",
    "KVWrite",
    "LMHead",
    "Linear",
    "MLAAbsorbed",
    "MLABlock",
    "MLADims",
    "MLAExpanded",
    "MLAKVWrite",
    "MLANormRopeWrite",
    "MTPLayer",
    "MoE",
    "MoEExperts",
    "MoERoute",
    "NormRopeWrite",
    "Op",
    "Quantize",
    "RMSNorm",
    "Rope",
    "Sample",
    "SampleTokens",
    "SiluMul",
    "Workload",
    "dequantize_rows",
    "each_range",
    "encode",
    "hidden_pairs",
    "placeholder",
    "values",
]

"""Small models, kernels and plans for the tests of types, ops and binding."""

from __future__ import annotations

import math
import types

import torch

from inferplane.binding import DictSource, Options, PlanSettings, bind, link, load
from inferplane.kvcache import paged_layout
from inferplane.models import Build, Config, deepseek_v3, llama
from inferplane.ops import OPS, encode
from inferplane.ops.op import relative_error
from inferplane.types import HOST, PLAIN, WHOLE, Features, Kernel, Placement, Weight

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
LAYOUT = paged_layout(16)
WHOLE_MODEL = Placement()

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "max_position_embeddings": 256,
}
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "num_nextn_predict_layers": 1,
}


PROJECTIONS, ENDS = ("_proj.weight", "_mqa.weight"), ("embed_tokens.weight", "lm_head.weight")


def quantized(format, names=PROJECTIONS):
    """Format by the end of a checkpoint's name: unless said otherwise, that of every projection."""
    return lambda name: format if name.endswith(names) else PLAIN


def tiny_llama(*, format=PLAIN, placement=WHOLE_MODEL, positions=256, names=PROJECTIONS, **changes):
    """A Llama of three layers, nothing read."""
    config = {**LLAMA, "max_position_embeddings": positions, **changes}
    return llama(Build(Config(config), placement, quantized(format, names), positions=positions))


def tiny_v3(*, format=PLAIN, mtp=False, **changes):
    """A DeepSeek-V3 of four layers, the first dense, nothing read."""
    return deepseek_v3(Build(Config({**V3, **changes}), WHOLE_MODEL, quantized(format), positions=256, mtp=mtp))


def function(op, name=None):
    """The op's own body as a kernel's function, under a name of its own."""
    body = OPS[op].__call__
    return types.FunctionType(body.__code__, body.__globals__, name or op, body.__defaults__, body.__closure__)


def kernel(op, provider="vendor", rank=90, *, target=None, **options):
    """A kernel that computes what the op's body computes; `name` is "provider:op"."""
    return Kernel(op, provider, target or function(op), rank=rank, **options)


def settings(dtype=F32, **options):
    """Settings for a device that is not one; every copy is allowed unless `copies` says otherwise."""
    return PlanSettings("toy", dtype, **{"features": Features(), "max_repacked_fraction": None, **options})


def plan(model, *kernels, offers=(LAYOUT,), pins=None, lock=None, demoted=None, kinds=None, strict=False, **options):
    """Bind `model` with these kernels and no others; `offers` is what the backend offers for every cache request."""
    return bind(
        model,
        kernels,
        settings(**options),
        offers if callable(offers) else lambda request: offers,
        options=Options(pins or {}, lock or {}, demoted or {}),
        strict=strict,
        **({"step_kinds": kinds} if kinds else {}),
    )


def choice(plan, path="", kind="decode"):
    """The choice at a site; the path may lead through decompositions only."""
    return next(c for site, _, c in plan.sites(kind) if site == path)


def chosen(plan, path="", kind="decode"):
    """What runs at a site: "provider:function", "decomposition", "reference"."""
    return choice(plan, path, kind).label


def lost(plan, path, name, kind="decode"):
    """Why a kernel lost at a site."""
    (reason,) = [r.reason for r in choice(plan, path, kind).rejected if r.kernel == name]
    return reason


def tensors_for(op, seed=0, dtype=F32):
    """Random tensors for every checkpoint name below `op`, of the shapes its weights ask for."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [o for _, o in op.sites() if o.name == "gqa_block"]
    heads = {id(b.qkv.weight): [n * b.head_dim for n in (b.heads[0], b.heads[1], b.heads[1])] for b in blocks}
    out = {}
    for _, weight in op.weights():
        if not weight.parts:
            continue
        rows = math.prod(weight.shape[:-1] or weight.shape)
        sizes = weight.rows or heads.get(id(weight)) or [rows // len(weight.parts)] * len(weight.parts)
        for part, n in zip(weight.parts, sizes):
            shape = (n, *weight.shape[1:][-1:]) if len(weight.parts) > 1 else weight.shape
            t = torch.randn(shape, generator=generator)
            t = t / shape[-1] ** 0.5 if len(shape) > 1 else t * 0.2 + 1
            out[part] = t.to(dtype)
    return out


def encoding(format):
    """A reader of a checkpoint that is stored plainly: encodes what it reads."""

    def read(source, name, shard):
        whole = torch.empty(source.shape(name))
        source.read_into(name, whole, WHOLE)
        q = encode(whole, format)
        return q if shard.size == 1 else q.shard(shard.axis, *shard.bounds(whole.shape[shard.axis]))

    return {format: read}


def bound(op, tensors=None, *kernels, kind="mixed", dtype=F32, readers=None, **options):
    """`op` bound, loaded and linked: a plain callable."""
    p = plan(op, *kernels, dtype=dtype, **options)
    return link(p, load(p, DictSource(tensors or {}), HOST, readers=readers).packed)[kind]


def w(name, *shape, **options):
    """A weight of one checkpoint tensor."""
    return Weight((name,), shape, **options)


def close(op, got, want, dtype=F32):
    """Whether a result is within the op's own tolerance; `want` may be float64."""
    return got.dtype is dtype and relative_error(got.double(), want.double()) <= op.tolerance[dtype]

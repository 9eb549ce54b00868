"""Multi-head latent attention: the cache keeps one latent vector per token; attention expands or absorbs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from inferplane.ops.attention import OTHER_SCALE, each_range, mask_pairs
from inferplane.ops.basic import RMSNorm, Rope, rope_table
from inferplane.ops.collective import AllReduce
from inferplane.ops.draw import Draw, Sequences, step_inputs
from inferplane.ops.linear import Linear
from inferplane.ops.op import ACCUMULATED, BLOCK, EXACT, Cost, Op, Sample, Workload, placeholder, values
from inferplane.renamed import old_attributes
from inferplane.types import ActivationQuant, Batch, KVRequest, LayerKV, StepKind, Weight
from inferplane.types.weight import OLD_OUTPUT_QUANT


@dataclass(frozen=True)
class MLADims:
    """Sizes of latent attention, in entries.

    Args:
        heads: query heads H on this rank.
        nope: query and key entries per head without rotation N.
        rope: rotated entries P, shared by all heads in the key.
        value: value entries per head V.
        latent: entries of the latent vector R (`kv_lora_rank`).
    """

    heads: int
    nope: int
    rope: int
    value: int
    latent: int

    @property
    def request(self) -> KVRequest:
        """The cache request: `[latent | rotated key]`, R + P entries per token."""
        return KVRequest("mla", 1, self.latent + self.rope, rope=self.rope)


class MLAKVWrite(Op, name="mla_kv_write"):
    """Store `[latent | rotated key]` of each token; rows with slot -1 are ignored.

    Args of the call:
        latent: `[T, R]`, after its norm. k_rope: `[T, P]`, rotated.
        batch: its `slots` `[T]`. kv: the layer's cache, changed.

    Returns:
        None.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    tolerance = EXACT
    writes_cache = True

    kv: KVRequest

    def __call__(self, latent: torch.Tensor, k_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> None:
        kv.write(batch.slots, torch.cat((latent, k_rope), -1))

    def cost(self, load: Workload) -> Cost:
        """Bytes read and written."""
        return Cost(2 * load.tokens * self.kv.entries * load.dtype.itemsize)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode and mixed steps over caches with history; V3's own dims."""

        def sample(label: str, latent: int, rope: int, sequences: Sequences, kind: StepKind) -> Sample:
            request = KVRequest("mla", 1, latent + rope, rope=rope)
            tensors = lambda d, t: (d.normal(t, latent), d.normal(t, rope + 16)[:, :rope])  # noqa: E731
            return Sample(label, MLAKVWrite(request), step_inputs(request, sequences, tensors), kind)

        return [
            sample("decode", 64, 32, [(1, 5), (2, 70)], "decode"),
            sample("mixed", 64, 32, [(1, 130), (50, 0), (9, 63)], "mixed"),
            sample("v3_decode", 512, 64, [(1, 127), (2, 70)], "decode"),
        ]


class MLAExpanded(Op, name="mla_expanded", hot=True):
    """Attention over K and V expanded from the latent, for many query tokens.

    `[k_nope | v] = kv_b(c); s = (q_nope k_nope^T + q_rope k_rope^T) scale; y = softmax(s) v`, causal, float32 inside.

    Args of the call:
        q_nope: `[T, H, N]`. q_rope: `[T, H, P]`, rotated. Either may be strided.
        batch: the step; its own latents are already in the cache. kv: the layer's cache.

    Returns:
        `[T, H, V]` in the dtype of `q_nope`.

    Fields: `kv_b` linear R -> H (N + V), rows `[k_nope | v]` per head; `dims`; `scale`; `kv`.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and appendix C.
    """

    tolerance = BLOCK

    kv_b: Linear
    dims: MLADims
    scale: float
    kv: KVRequest

    @property
    def serves_many_queries(self) -> bool:
        """See `Op.serves_many_queries`."""
        return True

    def __call__(self, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        d = self.dims
        out = q_nope.new_zeros(q_nope.shape[0], d.heads, d.value)
        for a, b, n, table in batch.rows():
            latent, k_rope = kv.read(table, n)[0].to(q_nope.dtype).split((d.latent, d.rope), -1)
            k, v = self.kv_b(latent.contiguous()).view(n, d.heads, -1).float().split((d.nope, d.value), -1)
            s = torch.einsum("qhd,khd->hqk", q_nope[a:b].float(), k)
            s = (s + torch.einsum("qhd,kd->hqk", q_rope[a:b].float(), k_rope.float())) * self.scale
            s = s.masked_fill(mask_pairs(b - a, n, None, q_nope.device), -torch.inf)
            out[a:b] = torch.einsum("hqk,khd->qhd", s.softmax(-1), v).to(out.dtype)
        return out

    def cost(self, load: Workload) -> Cost:
        """Reading and expanding the cache once, then scores and values per head."""
        d = self.dims
        expand = self.kv_b.cost(Workload(load.kv_tokens, dtype=load.dtype))
        attend = 2.0 * load.pairs * d.heads * (d.nope + d.rope + d.value)
        return expand + Cost(load.kv_tokens * self.kv.entries * load.dtype.itemsize, attend)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Prefill, chunks; V3's own dims with few heads; a scale of its own."""
        small, real = MLADims(2, 32, 16, 24, 48), MLADims(2, 128, 64, 128, 512)
        make = lambda d, **kw: MLAExpanded(  # noqa: E731
            Linear(placeholder(d.heads * (d.nope + d.value), d.latent, **kw)), d, (d.nope + d.rope) ** -0.5, d.request
        )
        scaled = replace(make(real), scale=OTHER_SCALE * make(real).scale)
        return [
            Sample("prefill", make(small), _queries(small, [(20, 0), (13, 0)])),
            Sample("chunks", make(small), _queries(small, [(9, 70), (33, 128)])),
            Sample("v3_dims", make(real), _queries(real, [(17, 60)])),
            Sample("fp8", make(real, format="fp8_block"), _queries(real, [(19, 33)])),
            Sample("int8", make(small, format="int8_group"), _queries(small, [(9, 70), (33, 0)])),
            Sample("int4", make(real, format="int4_group32"), _queries(real, [(17, 60)])),
            Sample("scaled", scaled, _queries(real, [(17, 30), (12, 0)])),
        ]


class MLAAbsorbed(Op, name="mla_absorbed", hot=True):
    """The same result as `MLAExpanded` with `kv_b` folded into the query and the output, for few query tokens.

    Per head, `W_k [N, R]` and `W_v [V, R]` are rows of `kv_b`: `q' = [q_nope W_k | q_rope]; s = q' c^T scale;
    y = (softmax(s) c[:R]) W_v^T`. Keys and values are never expanded: every head reads the same R + P entries per
    token.

    Args of the call:
        q_nope: `[T, H, N]`. q_rope: `[T, H, P]`, rotated. Either may be strided.
        batch: the step; its own latents are already in the cache. kv: the layer's cache.

    Returns:
        `[T, H, V]` in the dtype of `q_nope`.

    Fields: `kv_b` `[H (N + V), R]`, tied to `MLAExpanded.kv_b`; `dims`; `scale`; `kv`.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.2 ("absorbed").
    """

    tolerance = BLOCK

    kv_b: Weight
    dims: MLADims
    scale: float
    kv: KVRequest

    def __call__(self, q_nope: torch.Tensor, q_rope: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        d = self.dims
        w = values(self.kv_b).view(d.heads, d.nope + d.value, d.latent)  # type: ignore[arg-type]
        w_k, w_v = w.split((d.nope, d.value), 1)
        q = torch.cat((torch.einsum("thn,hnr->thr", q_nope.float(), w_k), q_rope.float()), -1)
        out = q_nope.new_zeros(q_nope.shape[0], d.heads, d.value)
        for a, b, n, table in batch.rows():
            c = kv.read(table, n)[0].float()
            s = torch.einsum("qhd,kd->hqk", q[a:b], c) * self.scale
            s = s.masked_fill(mask_pairs(b - a, n, None, q.device), -torch.inf)
            o = torch.einsum("hqk,kr->qhr", s.softmax(-1), c[:, : d.latent])
            out[a:b] = torch.einsum("qhr,hvr->qhv", o, w_v).to(out.dtype)
        return out

    def cost(self, load: Workload) -> Cost:
        """Reading the cache once and the weight once; folding, scores and values."""
        d = self.dims
        fold = 2.0 * load.tokens * d.heads * d.latent * (d.nope + d.value)
        attend = 2.0 * load.pairs * d.heads * (2 * d.latent + d.rope)
        moved = self.kv_b.nbytes(load.dtype) + load.kv_tokens * self.kv.entries * load.dtype.itemsize
        return Cost(moved, fold + attend)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Single tokens and drafts; V3's own dims with few and with more heads; a scale of its own."""
        small, real = MLADims(2, 32, 16, 24, 48), MLADims(4, 128, 64, 128, 512)
        wide = replace(real, heads=16)
        make = lambda d, **kw: MLAAbsorbed(  # noqa: E731
            placeholder(d.heads * (d.nope + d.value), d.latent, **kw), d, (d.nope + d.rope) ** -0.5, d.request
        )
        scaled = replace(make(real), scale=OTHER_SCALE * make(real).scale)
        return [
            Sample("decode", make(small), _queries(small, [(1, 5), (1, 90)]), "decode"),
            Sample("drafts", make(small), _queries(small, [(1, 0), (3, 64), (8, 127)]), "decode"),
            Sample("v3_dims", make(real), _queries(real, [(1, 100), (2, 30)]), "decode"),
            Sample("fp8", make(real, format="fp8_block"), _queries(real, [(1, 90), (3, 20)]), "decode"),
            Sample("int8", make(small, format="int8_group"), _queries(small, [(1, 9), (6, 70)]), "decode"),
            Sample("int4", make(real, format="int4_group32"), _queries(real, [(1, 90), (3, 20)]), "decode"),
            Sample("v3_heads", make(wide), _queries(wide, [(1, 100), (2, 30)]), "decode"),
            Sample("scaled", scaled, _queries(real, [(1, 90), (3, 20)]), "decode"),
        ]


@old_attributes(OLD_OUTPUT_QUANT)
class MLANormRopeWrite(Op, name="mla_norm_rope_write"):
    """The steps between latent attention's down-projections and the query's up-projection: norms, rotation, cache
    write.

    `[c | k_rope] = kv_a; write(kv_a_norm(c), rope(k_rope))`, and `q_a_norm(q)` if the query has its own low rank.
    Rows with slot -1 are not written.

    Args of the call:
        q: `[T, Q]`, or None if there is no `q_a_norm`. kv_a: `[T, R + P]`. Either may be strided.
        batch: its `positions` and `slots`. kv: the layer's cache, changed.

    Returns:
        The normed q, `[T, Q]`, or None.

    Fields: `output_quant` as in `AddRMSNorm`, for the normed q.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    tolerance = ACCUMULATED

    q_a_norm: RMSNorm | None
    kv_a_norm: RMSNorm
    rope: Rope
    write: MLAKVWrite
    dims: MLADims
    output_quant: ActivationQuant | None = None

    def __call__(self, q: torch.Tensor | None, kv_a: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor | None:
        latent, k_rope = kv_a.split((self.dims.latent, self.dims.rope), -1)
        k_rope = self.rope(k_rope[:, None], batch.positions)[:, 0]
        self.write(self.kv_a_norm(latent), k_rope, batch, kv)
        return None if q is None or self.q_a_norm is None else self.q_a_norm(q)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """With and without a low-rank query, decode and mixed steps; V3's own sizes."""

        def sample(
            label: str, q_rank: int, d: MLADims, sequences: Sequences, kind: StepKind, *, pairs: bool = True
        ) -> Sample:
            norm = RMSNorm(placeholder(q_rank), 1e-6) if q_rank else None
            rope, write = Rope(rope_table(d.rope), pairs), MLAKVWrite(d.request)
            op = MLANormRopeWrite(norm, RMSNorm(placeholder(d.latent), 1e-6), rope, write, d)

            def tensors(draw: Draw, tokens: int) -> tuple[torch.Tensor | None, torch.Tensor]:
                down = draw.normal(tokens, q_rank + d.latent + d.rope)
                return down[:, :q_rank] if q_rank else None, down[:, q_rank:]

            return Sample(label, op, step_inputs(d.request, sequences, tensors), kind)

        small, real = MLADims(2, 32, 16, 24, 48), MLADims(2, 128, 64, 128, 512)
        return [
            sample("decode", 40, small, [(1, 9), (3, 70)], "decode"),
            sample("mixed", 40, small, [(1, 100), (40, 0), (11, 60)], "mixed", pairs=False),
            sample("whole_query", 0, small, [(1, 63), (2, 64)], "decode"),
            sample("v3_decode", 1536, real, [(1, 127), (3, 70)], "decode"),
        ]


class MLABlock(Op, name="mla_block"):
    """A latent attention block: project, norm, rotate, write the latent, attend expanded or absorbed, project back.

    `c_q = enter(q_a(x), kv_a(x))` norms both, rotates the key and writes the latent; `[q_nope | q_rope] = q_b(c_q)` per
    head (`q_b(x)` if the query has no low rank); rotate q_rope; sequences with few query tokens attend absorbed, the
    others expanded. The variants "absorbed" and "expanded" use one form for every sequence.

    Args of the call:
        x: `[T, D]`. batch: the step. kv: the layer's cache, changed.

    Returns:
        `[T, D]` in the dtype of `x`.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv 2412.19437, section 2.1.1.
    """

    tolerance = BLOCK
    has_latent_attention = True

    q_a: Linear | None
    q_b: Linear
    kv_a: Linear
    enter: MLANormRopeWrite
    rope: Rope
    expanded: MLAExpanded
    absorbed: MLAAbsorbed
    o: Linear
    dims: MLADims
    reduce: AllReduce | None = None

    def __call__(self, x: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
        return _mla(self, x, batch, kv, self.absorbed, self.expanded)

    def cost(self, load: Workload) -> Cost:
        """The sum over the children, with the form of attention that needs fewer operations for this load."""
        attend = min(self.absorbed.cost(load), self.expanded.cost(load), key=lambda c: c.flops)
        forms = ("absorbed", "expanded")
        return sum((child.cost(load) for path, child in self.children() if path not in forms), attend)

    @classmethod
    def samples(cls) -> Sequence[Sample]:
        """Decode, prefill and a mixture; with and without the query's own low rank; V3's own dims with few heads."""
        small, real = MLADims(2, 32, 16, 24, 48), MLADims(2, 128, 64, 128, 512)

        def block(q_lora: int, d: MLADims = small) -> MLABlock:
            width = 64
            kv_b = placeholder(d.heads * (d.nope + d.value), d.latent)
            scale, rope = (d.nope + d.rope) ** -0.5, Rope(rope_table(d.rope), True)
            norm = RMSNorm(placeholder(q_lora), 1e-6) if q_lora else None
            latent_norm = RMSNorm(placeholder(d.latent), 1e-6)
            return MLABlock(
                q_a=Linear(placeholder(q_lora, width)) if q_lora else None,
                q_b=Linear(placeholder(d.heads * (d.nope + d.rope), q_lora or width)),
                kv_a=Linear(placeholder(d.latent + d.rope, width)),
                enter=MLANormRopeWrite(norm, latent_norm, rope, MLAKVWrite(d.request), d),
                rope=rope,
                expanded=MLAExpanded(Linear(kv_b), d, scale, d.request),
                absorbed=MLAAbsorbed(kv_b, d, scale, d.request),
                o=Linear(placeholder(width, d.heads * d.value)),
                dims=d,
            )

        def sample(label: str, op: MLABlock, sequences: Sequences, kind: StepKind) -> Sample:
            return Sample(label, op, step_inputs(op.dims.request, sequences, lambda d, t: (d.normal(t, 64),)), kind)

        return [
            sample("decode", block(40), [(1, 9), (3, 70)], "decode"),
            sample("prefill", block(40), [(33, 0), (20, 0)], "mixed"),
            sample("mixed", block(0), [(1, 100), (2, 47), (40, 0), (11, 60)], "mixed"),
            sample("v3_decode", block(40, real), [(1, 127), (3, 70)], "decode"),
            sample("v3_mixed", block(0, real), [(2, 130), (17, 0), (11, 60)], "mixed"),
        ]


def _mla(p: Any, x: torch.Tensor, batch: Batch, kv: LayerKV, few: Any, many: Any) -> torch.Tensor:
    d: MLADims = p.dims
    c = p.enter(None if p.q_a is None else p.q_a(x), p.kv_a(x), batch, kv)
    q_nope, q_rope = p.q_b(x if c is None else c).view(x.shape[0], d.heads, -1).split((d.nope, d.rope), -1)
    q_rope = p.rope(q_rope, batch.positions)
    y = p.o(each_range(batch, (q_nope, q_rope), few, many, kv).flatten(1))
    return y if p.reduce is None else p.reduce(y)


def _run_absorbed(self: Any, x: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    return _mla(self, x, batch, kv, self.absorbed, self.absorbed)


def _run_expanded(self: Any, x: torch.Tensor, batch: Batch, kv: LayerKV) -> torch.Tensor:
    return _mla(self, x, batch, kv, self.expanded, self.expanded)


MLABlock.variants = {"absorbed": _run_absorbed, "expanded": _run_expanded}


def _queries(dims: MLADims, sequences: Sequences) -> Any:
    def tensors(draw: Draw, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        wide = draw.normal(tokens, dims.heads, dims.nope + dims.rope)
        return wide[..., : dims.nope], draw.normal(tokens, dims.heads, dims.rope)

    return step_inputs(dims.request, sequences, tensors, written=True)

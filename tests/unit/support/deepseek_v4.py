"""DeepSeek-V4's attention alone: transformers' module with random weights, and ours with the same, run in steps."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as oracle
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from inferplane.binding.link import link
from inferplane.binding.load import load
from inferplane.engine.runner.kv_cache import build_pools, list_requests, place_caches
from inferplane.kvcache import paged_layout
from inferplane.kvcache.tables import TablePlan, deal_layers
from inferplane.models.build import Build
from inferplane.models.parts import shared_kv_attention
from inferplane.models.reading.config import Config
from inferplane.ops import mask_pairs
from inferplane.types import HOST, KVCache, LayerPlace
from inferplane.types.batch import Query, make_batch
from tests.unit.support.small import F32, WHOLE_MODEL, DictSource, plan

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "sliding_window": 20,
    "index_n_heads": 24,  # of so few as 4, all may be 0 at once, and ties are broken otherwise
    "index_head_dim": 16,
    "index_topk": 6,
    "max_position_embeddings": 1024,
    "compress_rates": {SPARSE: 4, HEAVY: 32},
    "num_nextn_predict_layers": 0,
}
PUBLISHED_NAMES = (
    (r"^compressor\.indexer\.scorer\.weights_proj", "indexer.weights_proj"),
    (r"^compressor\.indexer\.q_b_proj", "indexer.wq_b"),
    (r"^compressor\.indexer\.", "indexer.compressor."),
    (r"\bq_a_proj\b", "wq_a"),
    (r"\bq_b_proj\b", "wq_b"),
    (r"\bo_a_proj\b", "wo_a"),
    (r"\bo_b_proj\b", "wo_b"),
    (r"\bkv_proj\b", "wkv"),
    (r"\bgate_proj\b", "wgate"),
    (r"\bq_a_norm\b", "q_norm"),
    (r"compressor\.kv_norm", "compressor.norm"),
    (r"position_bias", "ape"),
    (r"^sinks$", "attn_sink"),
)
"""Names of transformers' module -> those in published checkpoints."""


def make_config(kind: str, **changes: Any) -> DeepseekV4Config:
    """The config of a model with one layer of this kind."""
    return DeepseekV4Config(**{**SIZES, "layer_types": [kind], **changes}, attn_implementation="eager")


class Reference:
    """Transformers' attention in float32 with random weights.

    Args:
        kind: of attention. changes: of the config's entries.
    """

    def __init__(self, kind: str, *, seed: int = 0, **changes: Any) -> None:
        torch.manual_seed(seed)
        self.config = make_config(kind, **changes)
        self.module = oracle.DeepseekV4Attention(self.config, 0).eval()
        for name, weight in self.module.named_parameters():
            scale = 1.0 if "sinks" in name or "bias" in name else weight.shape[-1] ** -0.5
            weight.data = torch.randn(weight.shape) * (0.3 if weight.dim() == 1 and "sinks" not in name else scale)
            weight.data += 1.0 if "norm" in name else 0.0

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, module: Any = None) -> torch.Tensor:
        """The result `[n, D]` for a whole sequence `[n, D]`."""
        n = x.shape[0]
        positions = torch.arange(n)[None]
        rotary = oracle.DeepseekV4RotaryEmbedding(self.config)
        turns = {kind: rotary(x[None], positions, layer_type=kind) for kind in ("main", "compress")}
        hidden = mask_pairs(n, n, self.config.sliding_window, x.device)
        mask = torch.zeros(1, 1, n, n).masked_fill(hidden, -torch.inf)
        return (module or self.module)(x[None], turns, positions, mask)[0][0]

    def tensors(self, prefix: str = "attn.") -> dict[str, torch.Tensor]:
        """The weights by their published names."""
        out = {}
        for name, weight in self.module.state_dict().items():
            if "rotary_emb" in name:
                continue
            for pattern, published in PUBLISHED_NAMES:
                name = re.sub(pattern, published, name)
            out[prefix + name] = weight
        return out


@dataclass
class Sequence:
    """A sequence that is run in steps: inputs `[n, D]`, tokens that are done, its blocks in each table."""

    x: torch.Tensor
    done: int
    blocks: list[list[int]]


class Rig:
    """Our attention with the weights of a reference, over the caches that an engine would build.

    Args:
        reference: has the weights.
        block_tokens: tokens per block. kv_dtype: of the cache.
        blocks: number of blocks of each pool.
        kernels: to bind; none: the bodies.
        placement: of the rank, whose part of the result is not added to others'.
    """

    def __init__(
        self,
        reference: Reference,
        *kernels: Any,
        block_tokens: int = 16,
        kv_dtype: str = "auto",
        blocks: int = 64,
        placement: Any = WHOLE_MODEL,
    ) -> None:
        config = Config({**reference.config.to_dict(), "architectures": ["DeepseekV4ForCausalLM"]})
        self.op: Any = replace(shared_kv_attention(Build(config, placement, positions=1024))(0, "attn"), reduce=None)
        self.requests = self.op.kv_requests()
        self.plan = plan(self.op, *kernels, offers=lambda request: [paged_layout(block_tokens, kv_dtype)])
        self.steps = link(self.plan, load(self.plan, DictSource(reference.tensors()), HOST).packed)
        requests = list_requests([self.op])
        of_tokens = [request for layer in requests for request in layer.of_tokens]
        self.tables: TablePlan = deal_layers(of_tokens)
        self.block_tokens, self.next_block = block_tokens, 0

        def build(stored: Any, count: int) -> KVCache:
            device = torch.device(HOST)
            layers = tuple(self.plan.layouts[r].build(r, count, F32, device) for r in stored)
            return KVCache(layers, count, block_tokens)

        counts = [blocks] * (1 + max(self.tables.list_pools()))
        self.cache = build_pools(self.tables, of_tokens, counts, block_tokens, build)
        (self.place,) = place_caches(requests, self.cache.layers, self.cache.list_tables(), 1, F32, torch.device(HOST))
        assert isinstance(self.place, LayerPlace)

    def start(self, x: torch.Tensor) -> Sequence:
        """A sequence of which nothing is done."""
        return Sequence(x, 0, [[] for _ in self.tables.windows])

    def step(self, *parts: tuple[Sequence, int], keep: bool = True) -> list[torch.Tensor]:
        """Run so many tokens of each sequence in one step; those with few come first. Without `keep` they do not
        count as done, as rejected drafts."""
        queries = []
        for sequence, count in parts:
            total = -(-(sequence.done + count) // self.block_tokens)
            for blocks in sequence.blocks:
                while len(blocks) < total:
                    blocks.append(self.next_block)
                    self.next_block += 1
            first, *more = sequence.blocks
            queries.append(Query([0] * count, sequence.done, first, None, more))
        batch = make_batch(queries, block_tokens=self.block_tokens, device=HOST)
        x = torch.cat([sequence.x[sequence.done : sequence.done + count] for sequence, count in parts])
        y = self.steps[batch.kind](x, batch.for_table(self.place.table), self.place.cache)
        for sequence, count in parts if keep else ():
            sequence.done += count
        return list(y.split([count for _, count in parts]))

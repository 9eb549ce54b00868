"""How much memory a step's results take beside weights and cache, from shapes alone: an estimate."""

from __future__ import annotations

from inferplane.engine.runner.planned_model import PlannedModel
from inferplane.ops import HashMoE, HyperCollapse, MLAExpanded, MoE, Op, StreamEmbedding


def count_activation_bytes(model: PlannedModel, tokens: int) -> int:
    """Bytes of the results that a step of `tokens` tokens holds at a time: the residual stream, and those of the op
    that holds most. In latent attention the step is a prompt without tokens before it, whose latents are expanded.

    Args:
        model: bound, not necessarily loaded.
        tokens: of the step.
    """
    vocab, hidden = model.model.embed.weight.shape
    widths = [w.shape[-2] for w in model.plan.weights.values() if len(w.shape) > 1 and vocab not in w.shape]
    peak = max([2 * max(widths, default=hidden), *(_count_entries(op, hidden) for _, op in model.model.sites())])
    embed = model.model.embed
    streams = embed.streams if isinstance(embed, StreamEmbedding) else 1
    return int(tokens * (4 * hidden * streams + peak) * model.dtype.itemsize)


def count_logit_bytes(model: PlannedModel, tokens: int) -> int:
    """Bytes of the logits of a step, in float32 and three times over: as computed, as changed, and as sorted."""
    rows = min(model.options.max_num_seqs, tokens)
    return 3 * rows * int(model.model.embed.weight.shape[0]) * 4


def _count_entries(op: Op, hidden: int) -> float:
    """Entries that an op holds per token of a step; 0: those of its widest matrix count."""
    if isinstance(op, MLAExpanded):  # queries, K and V of all tokens, and what attention returns
        dims = op.dims
        return float(dims.heads * (2 * (dims.nope + dims.rope) + 2 * dims.value))
    if isinstance(op, HyperCollapse):  # the streams in float32, and normed
        return 4.0 * op.fn.shape[1]
    if isinstance(
        op, (MoE, HashMoE)
    ):  # a row of each chosen expert of this rank: what it reads, both results, what it returns
        stack = op.experts.gate_up.shape
        here = op.route.top_k * stack[0] / op.router.weight.shape[0]
        return here * (2 * hidden + stack[-2] + stack[-2] / 2)
    return 0.0

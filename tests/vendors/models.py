"""Families of models on an emulated device, beside the cpu backend: by error against float32, and by tokens."""

from __future__ import annotations

from typing import Any

import torch

from inferplane.binding import explain
from inferplane.conformance import stepping
from inferplane.conformance.subject import Subject
from inferplane.kvcache import StatePool
from inferplane.ops import CausalLM, IndexSelect, LayerNorm, Linear, MoERoute
from inferplane.ops.moe import SQRT_SOFTPLUS, score_experts
from inferplane.plugin import Kernel, When
from inferplane.plugins import host
from inferplane.types.batch import Query, make_batch
from tests.vendors.configs import CHOSEN_TOKENS, EXPERTS, FAMILIES, ON_BODIES, model

LENGTHS = (135, 9, 20)
LARGEST_ERROR, OVER_CPU = 3e-2, 1.25
TOKENS = 64


def draw(tree: CausalLM, dtype: torch.dtype) -> dict[int, Any]:
    """Random weights; biases around 0, for those around 1 would drown what the matrices say."""
    drawn = stepping.draw_weights(tree, dtype)
    for _, op in tree.sites():
        if isinstance(op, (Linear, LayerNorm)) and op.bias is not None:
            drawn[id(op.bias)] = drawn[id(op.bias)] - 1.0
    return drawn


class Routes:
    """The experts that the float32 model chose, call by call: a rounding must not send a token elsewhere, which no
    tolerance could cover.
    """

    def __init__(self, monkeypatch):
        self.chosen = []
        self.at = 0
        body = MoERoute.__call__

        def record(op, logits):
            weights, ids = body(op, logits)
            self.chosen.append(ids)
            return weights, ids

        monkeypatch.setattr(MoERoute, "__call__", record)

    def kernel(self):
        """A kernel that outranks all others and takes the recorded experts."""

        def replay(view, logits):
            ids = self.chosen[self.at]
            self.at += 1
            if view.jitter:
                return _weigh_near(logits.float(), ids, view.jitter), ids
            scores = score_experts(logits.float(), view.score)
            weights = scores.gather(1, ids)
            if view.renormalize:
                weights = weights / (weights.sum(-1, keepdim=True).clamp_min(view.least_sum) + view.sum_eps + 1e-20)
            return weights * view.factor, ids

        known = When(extensions=("moe_route.least_sum", "moe_route.sum_eps", "moe_route.jitter", SQRT_SOFTPLUS))
        return Kernel("moe_route", "test", replay, when=known, rank=99)


class Selections:
    """The tokens that the float32 model's indexers chose, call by call, as `Routes` has the experts."""

    def __init__(self, monkeypatch):
        self.chosen = []
        self.at = 0
        body = IndexSelect.__call__

        def record(op, q, w, batch, kv):
            self.chosen.append(body(op, q, w, batch, kv))
            return self.chosen[-1]

        monkeypatch.setattr(IndexSelect, "__call__", record)

    def kernel(self):
        """A kernel that outranks all others and takes the recorded tokens."""

        def replay(view, q, w, batch, kv):
            self.at += 1
            return self.chosen[self.at - 1]

        return Kernel("index_select", "test", replay, when=When(extensions=("index_select.rate",)), rank=99)


def _weigh_near(logits: torch.Tensor, ids: torch.Tensor, jitter: float) -> torch.Tensor:
    """The weights of given experts where each is weighed among the logits near its own."""
    remaining, weights = logits, []
    for i in ids.split(1, 1):
        best = remaining.gather(1, i)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        weights.append(remaining.masked_fill(far, -torch.inf).softmax(-1).gather(1, i))
        remaining = remaining.scatter(1, i, -torch.inf)
    return torch.cat(weights, 1)


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in LENGTHS]


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Relative L2 error over all logits."""
    return (torch.cat(got) - torch.cat(want)).norm().item() / torch.cat(want).norm().item()


def errors_beside_cpu(
    device: str, dtype: torch.dtype, family: str, weights: str, schedule: str, monkeypatch: Any
) -> dict[str, float]:
    """Error of the logits against float32, on the cpu and on the device, with float32's experts and chosen tokens on
    both; checked.
    """
    config = FAMILIES[family]
    tree = model(config, weights)
    drawn = draw(tree, dtype)
    many, cut = prompts(config["vocab_size"]), stepping.SCHEDULES[schedule]
    routes, selections = Routes(monkeypatch), Selections(monkeypatch)
    want = stepping.run(stepping.on_references(tree, drawn, max(LENGTHS)), many, cut)
    assert (family in EXPERTS) == bool(routes.chosen) and (family in CHOSEN_TOKENS) == bool(selections.chosen)
    found = {}
    for name in ("cpu", device):
        subject = Subject.of(host(), name, str(dtype).removeprefix("torch."))
        subject.kernels += [routes.kernel(), selections.kernel()]
        if routes.chosen:  # a layer in one call chooses its experts itself
            subject.kernels = [k for k in subject.kernels if k.op != "decoder_layer"]
        routes.at = selections.at = 0
        bound = stepping.on_device(subject, tree, dtype, drawn, max(LENGTHS))
        got = stepping.run(bound, many, cut)
        assert routes.at == len(routes.chosen) and selections.at == len(selections.chosen)
        assert all(torch.isfinite(t).all() for t in got)
        found[name] = error(got, want)
    print(f"\n{family} {weights} {schedule}: {device} {found[device]:.4f}, cpu {found['cpu']:.4f}")
    assert found[device] <= LARGEST_ERROR, found
    assert found[device] <= OVER_CPU * found["cpu"], found
    return found


def greedy(bound: stepping.Bound, prompt: list[int], chunk: int) -> list[int]:
    """The prompt in chunks, then token by token, always the most probable."""
    blocks = list(range(bound.cache.blocks))[::-1]
    done, ids, new, pool = 0, list(prompt), [], StatePool.of(bound.cache)
    slots = None if pool is None else pool.allocate()
    with torch.inference_mode():
        while len(new) < TOKENS:
            part = ids[done : done + chunk]
            query = Query(part, done, blocks[: -(-(done + len(part)) // bound.cache.block_tokens)], 1, state=slots)
            batch = make_batch([query], block_tokens=bound.cache.block_tokens, device=bound.device)
            logits = bound.steps[batch.kind](batch, bound.cache)[0]
            done, slots = done + len(part), None if pool is None else pool.advance(slots)
            if done == len(ids):
                new.append(int(logits[-1].argmax()))
                ids.append(new[-1])
    return new


def tokens_beside_cpu(device: str, providers: tuple[str, ...], family: str, weights: str, chunk: int) -> None:
    """Greedy tokens at float32 are the cpu's, with attention by one of the vendor's providers."""
    config = FAMILIES[family]
    tree = model(config, weights)
    drawn = draw(tree, torch.float32)
    prompt = prompts(config["vocab_size"])[0][:100]
    tokens = {}
    for name in ("cpu", device):
        bound = stepping.on_device(Subject.of(host(), name, "float32"), tree, torch.float32, drawn, 200)
        tokens[name] = greedy(bound, prompt, chunk)
        if name == device and family not in ON_BODIES:
            served = [s["chosen"]["kernel"] for s in explain(bound.plan)["sites"]]
            assert any("attention" in k or "mla" in k for k in served if k.startswith(providers)), served
    assert tokens[device] == tokens["cpu"]
    assert len(set(tokens["cpu"])) > 4, "a text worth comparing"

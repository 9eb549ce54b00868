"""Routing and experts against plain loops over tokens and experts."""

import math

import pytest
import torch

from inferplane.ops import GatedMLP, Linear, MoE, MoEExperts, MoERoute, encode
from inferplane.types import Weight
from tests.unit.support.formulas import silu
from tests.unit.support.small import F32, bound, close, w


def route(
    logits,
    bias,
    *,
    top_k,
    sigmoid,
    groups=1,
    top_groups=1,
    best=1,
    renormalize=True,
    factor=1.0,
    least_sum=0.0,
    eps=0.0,
):
    """One token: `{expert: weight}`. `best` choices of a group are summed to judge it."""
    e = [math.exp(x) for x in logits]
    score = [1 / (1 + math.exp(-x)) for x in logits] if sigmoid else [x / sum(e) for x in e]
    choice = [s + b for s, b in zip(score, bias)]
    size = len(logits) // groups
    judged = {g: sum(sorted(choice[g * size : (g + 1) * size])[-best:]) for g in range(groups)}
    kept = sorted(judged, key=judged.get)[-top_groups:]
    allowed = [x for x in range(len(logits)) if x // size in kept]
    ids = sorted(allowed, key=choice.__getitem__)[-top_k:]
    total = max(sum(score[x] for x in ids), least_sum) + eps if renormalize else 1.0
    return {x: score[x] / total * factor for x in ids}


V3 = (
    MoERoute(w("b", 16), 4, "sigmoid", 4, 2, "top2", True, 2.5),
    {"top_k": 4, "sigmoid": True, "groups": 4, "top_groups": 2, "best": 2, "factor": 2.5},
)
V2 = (
    MoERoute(None, 3, "softmax", 4, 2, "max", False, 16.0),
    {"top_k": 3, "sigmoid": False, "groups": 4, "top_groups": 2, "renormalize": False, "factor": 16.0},
)
MIXTRAL = MoERoute(None, 2, "softmax"), {"top_k": 2, "sigmoid": False}
ERNIE = (
    MoERoute(w("b", 16), 2, "softmax", least_sum=0.2),
    {"top_k": 2, "sigmoid": False, "least_sum": 0.2},
)

LFM2 = MoERoute(w("b", 16), 3, "sigmoid", sum_eps=0.1), {"top_k": 3, "sigmoid": True, "eps": 0.1}


@pytest.mark.parametrize(("op", "rule"), [V3, V2, MIXTRAL, ERNIE, LFM2], ids=["v3", "v2", "mixtral", "ernie", "lfm2"])
def test_routing(op, rule):
    logits = torch.randn(50, 16, dtype=torch.float64)
    bias = torch.randn(16, dtype=torch.float64) if op.bias else torch.zeros(16, dtype=torch.float64)
    weights, ids = bound(op, {"b": bias.float()})(logits.float())
    assert weights.dtype is F32 and ids.dtype is torch.int64
    for t in range(50):
        want = route(logits[t].tolist(), bias.float().tolist(), **rule)
        got = dict(zip(ids[t].tolist(), weights[t].tolist()))
        assert got.keys() == want.keys() and got == pytest.approx(want, rel=1e-5)


def test_the_bias_chooses_but_does_not_weigh():
    op = MoERoute(w("b", 4), 1, "sigmoid", renormalize=False)
    bias = torch.tensor([0.0, 0.0, 9.0, 0.0])
    weights, ids = bound(op, {"b": bias})(torch.tensor([[3.0, 1.0, -2.0, 0.0]]))
    assert ids.item() == 2 and weights.item() == pytest.approx(1 / (1 + math.exp(2)))


def test_a_dropped_group_stays_dropped_when_all_choices_are_negative():
    op = MoERoute(w("b", 4), 2, "sigmoid", 2, 1, "top2")
    weights, ids = bound(op, {"b": torch.tensor([-5.0, -5.1, -9.0, -9.0])})(torch.zeros(1, 4))
    assert sorted(ids[0].tolist()) == [0, 1] and weights.sum().item() == pytest.approx(1.0)


def loops(x, gate_up, down, weights, ids):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(x.shape[0]):
        for weight, e in zip(weights[t].double(), ids[t].tolist()):
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            out[t] += weight * (down[e].double() @ (silu(gate) * up))
    return out


def draw(tokens=9, experts=6, width=32, inner=24, k=2):
    ids = torch.stack([torch.randperm(experts - 1)[:k] for _ in range(tokens)])  # nobody asks the last expert
    return torch.randn(tokens, width), torch.rand(tokens, k) + 0.1, ids


PARTS = tuple(f"e{e}.{part}" for e in range(6) for part in ("gate", "up"))
DOWN = tuple(f"e{e}.down" for e in range(6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_stacked_from_their_parts(dtype):
    op = MoEExperts(Weight(PARTS, (6, 48, 32)), Weight(DOWN, (6, 32, 24)))
    t = {n: (torch.randn(24, 32) / 6).to(dtype) for n in PARTS} | {n: (torch.randn(32, 24) / 5).to(dtype) for n in DOWN}
    gate_up = [torch.cat((t[f"e{e}.gate"], t[f"e{e}.up"])) for e in range(6)]
    x, weights, ids = draw()
    x = x.to(dtype)
    want = loops(x, gate_up, [t[n] for n in DOWN], weights, ids)
    assert close(op, bound(op, t, dtype=dtype)(x, weights, ids), want, dtype)


@pytest.mark.parametrize("format", ["fp8_block", "int8_row", "int4_group"])
def test_quantized_experts(format):
    op = MoEExperts(Weight(PARTS, (6, 48, 32), format=format), Weight(DOWN, (6, 32, 24), format=format))
    t = {n: encode(torch.randn(24, 32) / 6, format) for n in PARTS} | {
        n: encode(torch.randn(32, 24) / 5, format) for n in DOWN
    }
    readers = {format: lambda source, name, shard: t[name]}
    values = {n: q.dequantize() for n, q in t.items()}
    gate_up = [torch.cat((values[f"e{e}.gate"], values[f"e{e}.up"])) for e in range(6)]
    x, weights, ids = draw()
    got = bound(op, {n: q.data for n, q in t.items()}, readers=readers)(x, weights, ids)
    assert close(op, got, loops(x, gate_up, [values[n] for n in DOWN], weights, ids))


@pytest.mark.parametrize(("shared", "gated"), [(False, False), (True, False), (True, True)])
def test_moe(shared, gated):
    route_op, rule = MoERoute(w("b", 6), 2, "sigmoid", factor=1.5), {"top_k": 2, "sigmoid": True, "factor": 1.5}
    mlp = GatedMLP(Linear(w("sgu", 20, 32)), Linear(w("sd", 32, 10))) if shared else None
    gate_of_shared = Linear(w("sg", 1, 32), out_dtype=F32) if gated else None
    experts = MoEExperts(w("gu", 6, 48, 32), w("d", 6, 32, 24))
    op = MoE(Linear(w("r", 6, 32), out_dtype=F32), route_op, experts, mlp, shared_gate=gate_of_shared)
    t = {
        "r": torch.randn(6, 32) / 6,
        "b": torch.randn(6),
        "gu": torch.randn(6, 48, 32) / 6,
        "d": torch.randn(6, 32, 24) / 5,
        "sgu": torch.randn(20, 32) / 6,
        "sd": torch.randn(32, 10) / 3,
        "sg": torch.randn(1, 32) / 6,
    }
    x, _, _ = draw(tokens=12)
    want = torch.zeros(12, 32, dtype=torch.float64)
    for i in range(12):
        chosen = route((t["r"].double() @ x[i].double()).tolist(), t["b"].tolist(), **rule)
        ids, weights = torch.tensor([[*chosen]]), torch.tensor([[*chosen.values()]])
        want[i] = loops(x[i : i + 1], t["gu"], t["d"], weights, ids)[0]
        if shared:
            gate, up = (t["sgu"].double() @ x[i].double()).chunk(2)
            part = 1 / (1 + math.exp(-(t["sg"].double() @ x[i].double()).item())) if gated else 1.0
            want[i] += part * (t["sd"].double() @ (silu(gate) * up))
    assert close(op, bound(op, t)(x), want)

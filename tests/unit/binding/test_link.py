"""What the hot path holds: plain functions over views of packed weights."""

import sys
import types

import pytest
import torch

from inferplane.binding import DictSource, View, link, load
from inferplane.errors import KernelError
from inferplane.ops import CausalLM, GatedMLP, Linear, RMSNorm
from inferplane.types import Packing, Weight, When
from tests.unit.support.small import F32, bound, function, kernel, plan, tensors_for, tiny_llama, tiny_v3, w

T = Packing("v.t", lambda x: x.t().contiguous())
MLP = GatedMLP(Linear(Weight(("gate", "up"), (96, 64))), Linear(w("down", 64, 48)))


def linked(model, *kernels, **options):
    p = plan(model, *kernels, **options)
    return p, link(p, load(p, DictSource(tensors_for(model))).packed)


def test_a_bound_op_is_a_method_over_a_view():
    op = Linear(w("w", 4, 8), bias=w("b", 4))
    k = kernel("linear", packs={"weight": T})
    f = bound(op, {"w": torch.randn(4, 8), "b": torch.randn(4)}, k)
    assert type(f) is types.MethodType and f.__func__ is k.target and type(f.__self__) is View
    view = f.__self__
    assert view.weight.shape == (8, 4) and view.bias.shape == (4,), "each in its own packing"
    assert (view.act, view.act_group, view.out_dtype, view.prepared) == (None, 0, None, None)
    assert f.__func__.__closure__ is None


def test_bodies_hold_bound_children_and_statics():
    _, steps = linked(MLP, kernel("linear"))
    body = steps["decode"]
    assert body.__func__ is GatedMLP.__call__
    view = body.__self__
    assert type(view.down) is types.MethodType and view.down.__self__.weight.shape == (64, 48) and view.reduce is None


def test_a_composite_sees_the_fields_of_everything_below():
    _, steps = linked(MLP, kernel("gated_mlp", packs={"gate_up.weight": T}))
    view = steps["decode"].__self__
    assert type(view.gate_up) is View and view.gate_up.weight.shape == (64, 96) and view.down.weight.shape == (64, 48)
    assert view.down.bias is None and view.act.prepared is None


def test_tuples_of_ops_stay_tuples():
    model = tiny_v3(mtp=True)
    _, steps = linked(model, kernel("linear"))
    view = steps["mixed"].__self__
    assert len(view.layers) == 4 and len(view.mtp) == 1 and all(callable(layer) for layer in view.layers)
    whole = kernel("causal_lm", packs={"layers.2.attn.o.weight": T})
    _, steps = linked(tiny_v3(), whole)
    layers = steps["decode"].__self__.layers
    assert [type(x) for x in layers] == [View] * 4 and steps["decode"].__self__.mtp == ()
    assert [x.attn.o.weight.shape for x in layers] == [(64, 32)] * 2 + [(32, 64)] + [(64, 32)]


def test_what_is_shared_is_one_tensor():
    _, steps = linked(tiny_llama(tie_word_embeddings=True))
    view = steps["decode"].__self__
    assert view.embed.__self__.weight is view.head.__self__.weight
    assert view.embed.__self__.weight is steps["mixed"].__self__.embed.__self__.weight, "step kinds share weights"
    _, steps = linked(tiny_v3())
    attn = steps["decode"].__self__.layers[0].__self__.attn.__self__
    assert attn.absorbed.__self__.kv_b is attn.expanded.__self__.kv_b.__self__.weight


def test_variants_bind_their_body():
    model = tiny_v3()
    _, steps = linked(model, pins={"mla_block": "absorbed"})
    block = steps["mixed"].__self__.layers[1].__self__.attn
    assert block.__func__ is type(model.layers[1].attn).variants["absorbed"]


def test_step_kinds_are_bound_apart():
    few, many = (kernel("linear", k, when=When(step_kinds=(k,))) for k in ("decode", "mixed"))
    _, steps = linked(Linear(w("w", 4, 8)), few, many)
    assert steps["decode"].__func__ is few.target and steps["mixed"].__func__ is many.target
    assert steps["decode"].__self__.weight is steps["mixed"].__self__.weight


# -- prepare


def test_prepare_runs_once_a_choice_for_winners_only():
    calls = []

    def prepare(name):
        def run(op, ctx):
            calls.append((name, op.weight.shape, ctx.step_kind, ctx.dtype))
            return f"{name} {op.weight.shape[0]}"

        return run

    win, lose = (
        kernel("linear", "win", 90, prepare=prepare("win")),
        kernel("linear", "lose", 10, prepare=prepare("lose")),
    )
    model = tiny_llama()
    p, steps = linked(model, win, lose)
    shapes = [(128, 64), (64, 64), (192, 64), (64, 96)]
    assert calls == [("win", s, kind, F32) for kind in ("decode", "mixed") for s in shapes], "once, not once a layer"
    layers = [layer.__self__ for layer in steps["decode"].__self__.layers]
    assert {layer.attn.__self__.qkv.__self__.prepared for layer in layers} == {"win 128"}
    calls.clear()
    link(p, load(p, DictSource(tensors_for(model))).packed)
    assert len(calls) == 8, "a plan may be linked again"


def test_prepare_is_not_run_by_binding():
    def never(op, ctx):
        raise AssertionError

    plan(MLP, kernel("linear", prepare=never))


def test_prepare_that_raises_names_the_kernel():
    def broken(op, ctx):
        raise MemoryError("no workspace")

    with pytest.raises(KernelError, match=r"vendor:linear: prepare raised MemoryError: no workspace.*another provider"):
        linked(MLP, kernel("linear", prepare=broken))


# -- dotted targets


@pytest.fixture
def module(monkeypatch):
    """A module to name in targets; counts nothing, holds what a test puts in."""
    m = types.ModuleType("planted_kernels")
    monkeypatch.setitem(sys.modules, "planted_kernels", m)
    return m


NORM = RMSNorm(w("n", 8), 1e-6)


def test_a_dotted_target_is_imported_at_link(module):
    p = plan(NORM, kernel("rms_norm", target="planted_kernels:fast.norm"))
    module.fast = types.SimpleNamespace(norm=function("rms_norm"))
    f = link(p, load(p, DictSource({"n": torch.ones(8)})).packed)["decode"]
    assert f.__func__ is module.fast.norm and f(torch.randn(2, 8)).shape == (2, 8)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("planted_nowhere:norm", r"ModuleNotFoundError.*install the runtime of provider 'vendor'"),
        ("planted_kernels:norm", r"planted_kernels:norm cannot be imported \(AttributeError"),
        ("planted_kernels:number", r"TypeError: int is not callable"),
        ("planted_kernels:wrong", r"vendor:wrong takes \(y\) after its view, but op 'rms_norm' passes \(x\)"),
        ("planted_kernels", "cannot be imported"),
    ],
)
def test_a_dotted_target_that_is_wrong(module, target, words):
    module.number, module.wrong = 3, lambda p, y: y
    p = plan(NORM, kernel("rms_norm", target=target))
    with pytest.raises(KernelError, match=words):
        link(p, load(p, DictSource({"n": torch.ones(8)})).packed)


def test_only_winners_are_imported():
    p = plan(NORM, kernel("rms_norm", "win", 90), kernel("rms_norm", "lose", 10, target="planted_nowhere:norm"))
    link(p, load(p, DictSource({"n": torch.ones(8)})).packed)


def test_a_kernel_is_imported_once(module):
    model, seen = tiny_llama(), []

    class Counting(types.ModuleType):
        @property
        def norm(self):
            seen.append(1)
            return function("rms_norm")

    sys.modules["planted_kernels"] = Counting("planted_kernels")
    linked(model, kernel("rms_norm", target="planted_kernels:norm"), kinds=("decode",))
    assert len(seen) == 2, "once to check its parameters, once to keep it; not once a layer"


def test_what_all_layers_kernels_offer_is_used():
    """A chain where all share it, and a whole step where they share that as well."""

    def chain(views, x, residual, batch, caches):
        return x, residual

    def whole(model, batch, cache):
        return None

    dense = When(needs=(("a gated MLP", lambda op: op.mlp.name == "gated_mlp"),))
    for other, chained, stepped in (
        ({"chain": chain, "whole": whole}, True, whole),
        ({"chain": chain}, True, None),
        ({}, False, None),
    ):
        first = kernel("decoder_layer", "dense", when=dense, chain=chain, whole=whole)
        _, steps = linked(tiny_v3(), first, kernel("decoder_layer", "any", 50, **other))
        view = steps["decode"].__self__
        assert [layer.__func__ for layer in view.layers].count(first.target) == 1
        assert (hasattr(view.layers, "chain"), view.whole) == (chained, stepped)
    with pytest.raises(KernelError, match="no chain"):
        kernel("decoder_layer", whole=whole)


def test_a_whole_step_is_the_models_and_gathered_like_any():
    """What it gives is the model's, and the ranks' columns of its logits are joined."""
    half, states = torch.zeros(1, 2), torch.ones(1, 3)
    asked = []

    def whole(model, batch, cache):
        asked.append((model, batch, cache))
        return half, states

    view = View()
    view.whole, view.gather = whole, lambda x: torch.cat((x, x), 1)
    logits, hidden = CausalLM.__call__(view, "batch", "cache")
    assert asked == [(view, "batch", "cache")] and logits.shape == (1, 4) and hidden is states
    view.gather = None
    assert CausalLM.__call__(view, "batch", "cache")[0] is half

"""What the hot path holds: plain functions over views of packed weights."""

import sys
import types
from dataclasses import replace

import pytest
import torch

from inferplane.binding import DictSource, View, link, load, signature, view_of
from inferplane.binding.link import LinearView, link_observed
from inferplane.errors import BindError, KernelError
from inferplane.ops import DecoderStack, GatedMLP, Linear, RMSNorm
from inferplane.types import Packing, Weight, When
from tests.unit.support.small import (
    F32,
    bound,
    choice,
    chosen,
    function,
    kernel,
    lost,
    plan,
    tensors_for,
    tiny_llama,
    tiny_v3,
    w,
)

T = Packing("v.t", lambda x: x.t().contiguous())
MLP = GatedMLP(Linear(Weight(("gate", "up"), (96, 64))), Linear(w("down", 64, 48)))


def linked(model, *kernels, **options):
    p = plan(model, *kernels, **options)
    return p, link(p, load(p, DictSource(tensors_for(model))).packed)


def layers_of(step):
    """The views of a bound model's layers."""
    return [view_of(layer) for layer in view_of(view_of(step).layers).layers]


def test_a_bound_op_is_a_method_over_a_view():
    op = Linear(w("w", 4, 8), bias=w("b", 4))
    k = kernel("linear", packs={"weight": T})
    f = bound(op, {"w": torch.randn(4, 8), "b": torch.randn(4)}, k)
    assert type(f) is types.MethodType and f.__func__ is k.target and type(view_of(f)) is LinearView
    view = view_of(f)
    assert view.kernel is k
    assert view.weight.shape == (8, 4) and view.bias.shape == (4,), "each in its own packing"
    assert (view.activation_quant, view.activation_group, view.out_dtype, view.prepared) == (None, 0, None, None)
    assert f.__func__.__closure__ is None


def test_bodies_hold_bound_children_and_statics():
    _, steps = linked(MLP, kernel("linear"))
    body = steps["decode"]
    assert body.__func__ is GatedMLP.__call__
    view = view_of(body)
    assert view.kernel is None
    assert type(view.down) is types.MethodType and view_of(view.down).weight.shape == (64, 48) and view.reduce is None


def test_a_composite_sees_the_fields_of_everything_below():
    _, steps = linked(MLP, kernel("gated_mlp", packs={"gate_up.weight": T}))
    view = view_of(steps["decode"])
    assert (
        type(view.gate_up) is LinearView
        and view.gate_up.weight.shape == (64, 96)
        and view.down.weight.shape == (64, 48)
    )
    assert view.down.bias is None and view.act.prepared is None


def test_tuples_of_ops_stay_tuples():
    model = tiny_v3(mtp=True)
    _, steps = linked(model, kernel("linear"))
    view = view_of(steps["mixed"])
    layers = view_of(view.layers).layers
    assert len(layers) == 4 and len(view.mtp) == 1 and all(callable(layer) for layer in layers)
    whole = kernel("causal_lm", packs={"layers.2.attn.o.weight": T})
    _, steps = linked(tiny_v3(), whole)
    view = view_of(steps["decode"])
    layers = view.layers.layers
    assert [type(x) for x in layers] == [View] * 4 and view.mtp == ()
    assert [x.attn.o.weight.shape for x in layers] == [(64, 32)] * 2 + [(32, 64)] + [(64, 32)]


def test_what_is_shared_is_one_tensor():
    _, steps = linked(tiny_llama(tie_word_embeddings=True))
    views = [view_of(step) for step in steps.values()]
    assert view_of(views[0].embed).weight is view_of(views[0].head).weight
    assert view_of(views[0].embed).weight is view_of(views[1].embed).weight, "step kinds share weights"
    _, steps = linked(tiny_v3())
    attn = view_of(layers_of(steps["decode"])[0].attn)
    assert view_of(attn.absorbed).kv_b is view_of(view_of(attn.expanded).kv_b).weight


def test_variants_bind_their_body():
    model = tiny_v3()
    _, steps = linked(model, pins={"mla_block": "absorbed"})
    block = layers_of(steps["mixed"])[1].attn
    assert block.__func__ is type(model.layers[1].attn).variants["absorbed"]


def test_step_kinds_are_bound_apart():
    few, many = (kernel("linear", k, when=When(step_kinds=(k,))) for k in ("decode", "mixed"))
    _, steps = linked(Linear(w("w", 4, 8)), few, many)
    assert steps["decode"].__func__ is few.target and steps["mixed"].__func__ is many.target
    assert view_of(steps["decode"]).weight is view_of(steps["mixed"]).weight


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
    layers = layers_of(steps["decode"])
    assert {view_of(view_of(layer.attn).qkv).prepared for layer in layers} == {"win 128"}
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


def inlining(op, *names, rank=60, **options):
    """A kernel of a model or a stack that inlines children, and gives its view and its arguments."""

    def decoder_stack(view, x, residual, batch, cache):
        return view, x

    def causal_lm(view, batch, cache):
        return view

    target, path = (decoder_stack, "*") if op == "decoder_stack" else (causal_lm, "layers")
    return kernel(op, "all", rank, target=target, inlines={path: names}, **options)


LAYER = kernel("decoder_layer", "any", 50)


def test_a_kernel_inlines_children_that_are_bound_to_kernels_it_knows():
    """It sees their views, each with its kernel, and the body over the same children."""
    stack = inlining("decoder_stack", "any:decoder_layer")
    p, steps = linked(tiny_v3(), stack, LAYER)
    assert chosen(p, "layers") == stack.name and chosen(p, "layers.2") == LAYER.name
    view = view_of(steps["decode"])
    seen, x = view.layers("x", None, "batch", "cache")
    assert x == "x" and [layer.kernel for layer in seen.layers] == [LAYER] * 4 and seen.kernel is stack
    assert [view_of(layer) for layer in view_of(seen.body).layers] == list(seen.layers)
    assert seen.body.__func__ is DecoderStack.__call__


def test_kernels_that_inline_nest():
    model, stack = inlining("causal_lm", "all:decoder_stack"), inlining("decoder_stack", "any:decoder_layer")
    p, steps = linked(tiny_v3(), model, stack, LAYER)
    view = steps["decode"]("batch", "cache")
    assert view.kernel is model and view.layers.kernel is stack and view.layers.layers[0].kernel is LAYER
    assert callable(view.sample) and callable(view.norm), "what it does not inline is bound"
    assert p.weight_bytes == plan(tiny_v3(), LAYER).weight_bytes


def test_calls_of_bound_ops_can_be_observed():
    """Each op that is bound by itself is called by what was put in its place; the root is returned as it is bound."""
    model, seen, bound_at = tiny_llama(), [], {}

    def around(site, op, bound):
        bound_at[site] = op, bound

        def call(*args):
            seen.append(site)
            return bound(*args)

        return call

    def decoder_layer(view, x, residual, batch, kv):
        return x, residual

    layer = kernel("decoder_layer", "any", 50, target=decoder_layer)
    p = plan(model, inlining("decoder_stack", "any:decoder_layer"), layer)
    root = link_observed(p, load(p, DictSource(tensors_for(model))).packed, "mixed", around)
    sites = dict(model.sites())
    assert {site: op for site, (op, _) in bound_at.items()} == {s: sites[s] for s in bound_at}
    assert set(bound_at) == {site for site, _, _ in p.sites("mixed") if site}
    parts = view_of(root)
    view_of(root).embed(torch.tensor([1, 2]))
    inlined, _ = parts.layers("x", None, "batch", "cache")
    assert seen == ["embed", "layers"]
    assert inlined.layers[0] is view_of(bound_at["layers.0"][1]), "what a kernel inlines is not observed"
    view_of(inlined.body).layers[1]("x", None, "batch", "cache")
    assert seen == ["embed", "layers", "layers.1"]


@pytest.mark.parametrize("pins", [{"layers.1": "decomposition"}, {"layers.1.mlp": "reference"}])
def test_a_child_that_is_bound_to_something_else_is_named(pins):
    stack = inlining("decoder_stack", "any:decoder_layer")
    p = plan(tiny_v3(), stack, LAYER, pins=pins)
    assert chosen(p, "layers") == "decomposition" and chosen(p, "layers.0") == LAYER.name
    assert lost(p, "layers", stack.name) == "layers.1 is bound to decomposition, which it cannot run"
    with pytest.raises(BindError, match=r"'decoder_stack' at layers .*refused: layers\.1 is bound to decomposition"):
        plan(tiny_v3(), stack, LAYER, pins={**pins, "decoder_stack": "all"})
    other = plan(tiny_v3(), stack, kernel("decoder_layer", "other", 70), LAYER)
    assert lost(other, "layers", stack.name) == (
        "layers.0 is bound to other:decoder_layer, which it cannot run, and 3 more such"
    )


def test_ranks_pins_and_the_lock_file_decide_of_a_kernel_that_inlines():
    low = inlining("decoder_stack", "any:decoder_layer", rank=40)
    assert "slowest hot part has rank 50" in choice(plan(tiny_v3(), low, LAYER), "layers").why
    assert chosen(plan(tiny_v3(), low, LAYER, pins={"layers": "all"}), "layers") == low.name
    model = tiny_v3()
    lock = {f"decoder_stack|{kind}|{signature(model.layers)}": low.name for kind in ("decode", "mixed")}
    assert chosen(plan(model, low, LAYER, lock=lock), "layers") == low.name
    with pytest.raises(KernelError, match=r"packs 'layers\.0\.attn\.o\.weight', but runs children"):
        plan(tiny_v3(), inlining("decoder_stack", "any", packs={"layers.0.attn.o.weight": T}), LAYER)


def test_a_model_takes_its_layers_as_a_tuple():
    model = tiny_llama()
    again = replace(model, layers=tuple(model.layers))
    assert type(again.layers) is DecoderStack and len(again.layers) == len(list(again.layers)) == len(model.layers)
    assert [site for site, _ in again.sites()] == [site for site, _ in model.sites()]
    assert again.layers[0] is model.layers[0] and "layers.0.attn.qkv" in {site for site, _ in model.sites()}

"""Everything that `inferplane.plugin` and `inferplane` promised in 0.1 is there, with its parameters in their places.

`names_v1_0.txt` lists it: a value or a field `Name`, `Class.field`; a function or a class `name(parameter, ...)`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch

import inferplane.plugin
from inferplane import SamplingParams, SpeculativeConfig
from inferplane.engine.clients.options import OLD_NAMES, OPTIONS
from inferplane.engine.speculate import config as speculate_config
from inferplane.ops import AddRMSNorm, GatedMLP, Linear, Quantize, RMSNorm
from inferplane.plugin import (
    HOST,
    ActivationQuant,
    Feature,
    Features,
    Kernel,
    KVCache,
    KVRequest,
    QTensor,
    UsageError,
    Weight,
)
from tests.unit.support.small import LAYOUT, bound, plan, tiny_llama, w

LINES = Path(__file__).with_name("names_v1_0.txt").read_text(encoding="utf-8").splitlines()
RENAMED = {
    ("Kernel", "codes"): "quantizes_activations_to",
    ("Kernel", "chain"): "stack_function",
    ("Kernel", "whole"): "model_function",
    ("Weight", "act"): "activation_quant",
    ("Features.lacking", "wanted"): "required",
    ("AsyncLLM", "warned"): "on_warning",
    ("Accelerator.opening", "usable"): "counted_devices",
    ("Accelerator.opening", "visible"): "visibility_variables",
    ("Accelerator.opening", "look"): "diagnosis",
    ("Accelerator.opening", "fit"): "version_hint",
    ("Accelerator.opening", "one"): "device_label",
    **{("SpeculativeConfig", old): new for old, new in speculate_config.OLD_NAMES.items()},
}
"""What is promised under another name now: `(owner, old name)` -> present name. The old one is tried below."""


@pytest.mark.parametrize("line", LINES)
def test_a_promised_name(line):
    name, parameters = re.fullmatch(r"([\w.]+)(?:\((.*)\))?", line).groups()
    owner, _, member = name.partition(".")
    if name in OLD and not member:
        return
    module = next(m for m in (inferplane.plugin, inferplane) if owner in m.__all__)
    found = getattr(module, owner)
    if member:
        names = {*dir(found), *(name for base in found.__mro__ for name in getattr(base, "__annotations__", {}))}
        assert member in names
    if parameters is None:
        return
    if member:
        found = inspect.getattr_static(found, member)
        if isinstance(found, property):  # the old name of a method
            assert name in OLD
            return
        found = found.__get__(None, type(found)) if isinstance(found, (classmethod, staticmethod)) else found
    have = list(inspect.signature(found).parameters.values())
    if member and have and have[0].name in ("self", "cls"):
        have = have[1:]
    keyword = False
    for i, old in enumerate(filter(None, parameters.split(", "))):
        if old == "*":
            keyword = True
            continue
        new = RENAMED.get((name, old), old.lstrip("*"))
        if name == "LLM" and keyword:
            assert OLD_NAMES.get(old, old) in OPTIONS
            continue
        assert new in [p.name for p in have], f"the keyword {old}"
        assert keyword or have[i].name == new, f"the place of {old}"
    more = have[len([x for x in parameters.split(", ") if x and x != "*"]) :]
    assert all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in more), (
        "no more is needed"
    )


def test_renamed_names_are_promised_ones():
    for owner, old in RENAMED:
        assert old in speculate_config.OLD_NAMES or any(line.startswith(f"{owner}(") and old in line for line in LINES)


QUANT = ActivationQuant("fp8", static=True)
NAMES = (("a",), (8, 8))
OLD = {
    "installed": (
        lambda: [inferplane.plugin.installed(name) for name in ("torch", "surely_not_installed")],
        lambda found: found == [True, False],
    ),
    "BlockedKV.stored": (
        lambda: LAYOUT.build(KVRequest("gqa", 1, 8, 8), 3, torch.float32, torch.device(HOST)).stored(),
        lambda tensors: len(tensors) == 2 and tensors[0].shape[0] == 3,
    ),
    "QTensor.expanded_scale": (
        lambda: QTensor(
            torch.ones(2, 4, dtype=torch.int8), torch.tensor([[2.0], [3.0]]), block=(1, 4)
        ).expanded_scale(),
        lambda scale: scale.tolist() == [[2.0] * 4, [3.0] * 4],
    ),
    "Kernel.codes": (
        lambda: Kernel("linear", "p", "m:f", codes="fp8"),
        lambda kernel: (kernel.quantizes_activations_to, kernel.codes) == ("fp8", "fp8"),
    ),
    "Kernel.codes replaced": (
        lambda: dataclasses.replace(Kernel("linear", "p", "m:f", quantizes_activations_to="int8"), codes="fp8"),
        lambda kernel: kernel.quantizes_activations_to == "fp8",
    ),
    "Kernel.coarser": (
        lambda: Kernel("linear", "p", "m:f", codes="fp8", extra_error=0.1).coarser(tiny_llama()),
        lambda found: found is True,
    ),
    "Weight.act": (
        lambda: Weight(*NAMES, act="fp8_static"),
        lambda weight: weight.activation_quant == QUANT and weight.act == "fp8_static",
    ),
    "Weight.act by its place": (
        lambda: Weight(*NAMES, None, "fp8_row", None, inferplane.types.WHOLE, False, None, (), "fp8_static"),
        lambda weight: weight.activation_quant == QUANT,
    ),
    "Weight.act replaced": (
        lambda: dataclasses.replace(Weight(*NAMES, activation_quant=QUANT), act="int8"),
        lambda weight: weight.activation_quant == ActivationQuant("int8"),
    ),
    "Weight.act removed": (
        lambda: dataclasses.replace(Weight(*NAMES, activation_quant=QUANT), act=""),
        lambda weight: weight.activation_quant is None,
    ),
    "wanted of Features.lacking": (
        lambda: Features({"fp8": Feature(False, "too old")}).lacking(wanted=["fp8"]),
        lambda reasons: reasons == ["feature 'fp8' is absent: too old"],
    ),
    "KVCache.extra": (
        lambda: KVCache((), 3, 16, {"workspace": 7}),
        lambda cache: cache.extra["workspace"] == 7,
    ),
    "KVCache.extra by name": (
        lambda: KVCache(layers=(), blocks=3, block_tokens=16, extra={"workspace": 7}),
        lambda cache: dataclasses.replace(cache, blocks=4).extra["workspace"] == 7,
    ),
    "SamplingParams.cuts": (
        lambda: [SamplingParams(top_k=k).cuts for k in (0, 3)],
        lambda found: found == [False, True],
    ),
    "SpeculativeConfig.keys_next_token": (
        lambda: [SpeculativeConfig(method).keys_next_token for method in ("mtp", "ngram")],
        lambda found: found == [True, False],
    ),
    "SpeculativeConfig.speculate_method": (
        lambda: SpeculativeConfig(speculate_method="ngram", speculate_max_draft_token_num=3),
        lambda config: (config.speculate_method, config.num_speculative_tokens) == ("ngram", 3),
    ),
    "Op.acts": (
        lambda: Linear(Weight(*NAMES, format="fp8_row", activation_quant=QUANT)).acts(),
        lambda found: found == {"fp8"},
    ),
    "Linear.act": (
        lambda: Linear(w("w", 8, 8), act=Quantize("fp8", 4), act_group=4),
        lambda op: (op.act.format, op.act_group, op.activation_quant.group, op.activation_group) == ("fp8", 4, 4, 4),
    ),
    "Linear.act replaced": (
        lambda: dataclasses.replace(Linear(w("w", 8, 8), activation_group=4), act=Quantize("int8", 0)),
        lambda op: (op.activation_quant.format, op.activation_group) == ("int8", 4),
    ),
    "Linear.act read": (lambda: Linear(w("w", 8, 8)).act, lambda quant: quant is None),
    "Linear.act_group read": (lambda: Linear(w("w", 8, 8), activation_group=4).act_group, lambda group: group == 4),
    "AddRMSNorm.codes": (
        lambda: [AddRMSNorm(RMSNorm(w("n", 8), 1e-6), q).codes for q in (None, ActivationQuant("int8", 4))],
        lambda found: found == ["", "int8"],
    ),
    "AddRMSNorm.codes_group": (
        lambda: [AddRMSNorm(RMSNorm(w("n", 8), 1e-6), q).codes_group for q in (None, ActivationQuant("int8", 4))],
        lambda found: found == [0, 4],
    ),
}


@pytest.mark.parametrize("case", OLD)
def test_an_old_name_works_and_warns(case):
    make, holds = OLD[case]
    with pytest.warns(DeprecationWarning, match=r"is deprecated; use .* \(removed in 0\.3\)"):
        made = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert holds(made)


def test_both_names_at_once_are_refused():
    with (
        pytest.warns(DeprecationWarning, match="codes"),
        pytest.raises(UsageError, match="codes and quantizes_activations_to are"),
    ):
        Kernel("linear", "p", "m:f", codes="fp8", quantizes_activations_to="fp8")


def test_new_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = Kernel("linear", "p", "m:f", quantizes_activations_to="fp8")
        assert not kernel.is_less_precise_than(tiny_llama()) and dataclasses.replace(kernel, rank=3).rank == 3
        weight = dataclasses.replace(Weight(*NAMES, activation_quant=QUANT), optional=True)
        assert weight.activation_quant is QUANT and KVCache((), 1, 16).extra == {}
        assert Features(["fp8"]).lacking(["fp8"]) == []
        assert hash(KVCache((), 1, 16)) == hash(KVCache((), 1, 16))


def test_what_a_kernel_reads_of_a_norm():
    """A view has `codes` and `codes_group`, as the kernels of norms read in 1.0."""
    op = AddRMSNorm(RMSNorm(w("n", 8), 1e-6), ActivationQuant("fp8", 4))
    view = bound(op, {"n": torch.ones(8)}).__self__
    with pytest.warns(DeprecationWarning, match="View.codes is deprecated; use output_quant"):
        assert (view.codes, view.codes_group) == ("fp8", 4)
    assert not hasattr(bound(op.norm, {"n": torch.ones(8)}).__self__, "codes")


def test_what_a_kernel_reads_of_a_linear():
    """Its view has `act` and `act_group` as in 1.0, also as a part of another view; `act` of a gated MLP is its own."""
    op = GatedMLP(Linear(w("up", 16, 8)), Linear(w("down", 8, 8)))
    view = bound(op, {"up": torch.ones(16, 8), "down": torch.ones(8, 8)}).__self__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert op.act is not None and view.act is not None
    linear = view.down.__self__
    with pytest.warns(DeprecationWarning, match="LinearView.act_group is deprecated; use activation_group"):
        assert (linear.act, linear.act_group) == (None, 0)
    assert not hasattr(bound(RMSNorm(w("n", 8), 1e-6), {"n": torch.ones(8)}).__self__, "act")


def test_a_kernel_of_a_whole_model_reads_its_layers_as_a_tuple():
    """In 1.0 a model had a tuple of layers; now they are an op, whose view is a sequence of them."""

    def causal_lm(op, batch, cache):
        return len(op.layers), [layer.attn.o.weight.shape for layer in op.layers], op.layers[1].mlp.down.weight.shape

    from inferplane.binding import DictSource, link, load
    from tests.unit.support.small import tensors_for

    model = tiny_llama()
    p = plan(model, Kernel("causal_lm", "old", causal_lm, rank=90), offers=(LAYOUT,))
    steps = link(p, load(p, DictSource(tensors_for(model))).packed)
    assert steps["decode"](None, None) == (3, [(64, 64)] * 3, (64, 96))


MODULES = {
    "graphs": {"Graphs": "GraphCapturer", "Graph": "CapturedGraph", "RecordingAccelerator": "CapturingAccelerator"},
    "fused.latents": {"halves": "split_kv_b", "folded": "fold_query", "expanded": "expand_latents"},
    "fused.needs": {"WEIGHT_ONLY": "PLAIN_ACTIVATIONS", "EVERY_EXPERT": "ALL_EXPERTS_LOCAL", "HALF": "HALF"},
    "fused.operands": {"one": "unit_scale", "running_sum": "cumulative_lengths"},
    "fused.forms": {"AS_IT_IS": "CACHE_DTYPE", "silu_mul": "silu_mul"},
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_backends_share_has_its_old_names_too(module):
    old = importlib.import_module(f"inferplane.kernels.{module}")
    home = importlib.import_module(f"inferplane.kernels.{module.replace('forms', 'vllm_calls')}")
    for name, new in MODULES[module].items():
        assert getattr(old, name) is getattr(home, new)
    with pytest.raises(AttributeError, match="has no attribute 'surely_not'"):
        _ = old.surely_not


def test_a_backend_of_graphs_by_its_old_names():
    from inferplane.kernels import graphs

    with pytest.warns(DeprecationWarning, match="RecordingAccelerator is deprecated; use CapturingAccelerator"):
        base = graphs.RecordingAccelerator
    with pytest.warns(DeprecationWarning, match="Old.graph is deprecated; use graph_class"):
        old = type("Old", (base,), {"graph": "CUDAGraph"})
    assert old.graph_class == "CUDAGraph"
    with pytest.warns(DeprecationWarning, match="record is deprecated; use capture"):
        assert graphs.GraphCapturer(graph_class="NoGraph").record(torch, None, None) is None
    with pytest.warns(DeprecationWarning, match="kind is deprecated; use graph_class"):
        assert graphs.GraphCapturer(kind="NoGraph").graph_class == "NoGraph"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_shared_packings_by_their_old_names():
    from inferplane.kernels.fused.packings import Int8Rows, RopeTable

    table = RopeTable(torch.ones(4, 2, 3))
    assert torch.equal(table.in_dtype(torch.float16), table.to_dtype(torch.float16))
    rows = Int8Rows(QTensor(torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 1), block=(1, 4)))
    y = torch.ones(1, 2)
    assert rows.shifted(y, torch.ones(1, 4)) is y

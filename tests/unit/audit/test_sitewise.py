"""Errors that arrive and errors that are introduced: planted faults, and factors whose effect is known."""

from __future__ import annotations

import gc
import math
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM
from inferplane.audit import audit_sites
from inferplane.audit.differences import Difference, list_results
from inferplane.audit.observe import ObservedModel
from inferplane.calibrate.texts import Window
from inferplane.errors import UnsupportedModelError, UsageError
from inferplane.ops import Linear, MoERoute
from tests.families.cases import make

TOKENS = 60
OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 1, "max_model_len": 64, "max_num_batched_tokens": 64}


def opened(model, **options):
    return LLM(model, **{**OPTIONS, **options})


def draw(vocab, count=2, tokens=TOKENS):
    g = torch.Generator().manual_seed(5)
    return [Window("a", torch.randint(0, vocab, (tokens,), generator=g).tolist()) for _ in range(count)]


def disturb(folder: Path, to: Path, change) -> str:
    """A copy of a checkpoint whose tensors `change(name, value)` replaces; returns the first name that it changed."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    changed = {name: new for name, value in tensors.items() if (new := change(name, value)) is not None}
    save_file({**tensors, **changed}, to / "model.safetensors", metadata={"format": "pt"})
    return next(iter(changed))


def audit(folder, other, options=None, other_options=None, **more):
    with opened(folder, **(options or {})) as model, opened(other, **(other_options or {})) as reference:
        return audit_sites(model, reference, draw(model.engine.vocab), **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("llama")
    make("llama", "gqa", found)
    return found


FAMILIES = [
    ("llama", "gqa", "layers.1.mlp.down_proj", "layers.1.mlp.down"),
    ("llama", "gqa", "layers.1.self_attn.k_proj", "layers.1.attn.qkv"),
    ("llama", "gqa", "layers.1.post_attention_layernorm", "layers.1.mlp_norm"),
    ("llama", "gqa", "model.embed_tokens", "embed"),
    ("llama", "gqa", "lm_head", "head"),
    ("qwen3", "window", "layers.1.self_attn.q_norm", "layers.1.attn.enter.q_norm"),
    ("mixtral", "plain", "layers.1.block_sparse_moe.gate", "layers.1.mlp.router"),
    ("mixtral", "plain", "layers.1.block_sparse_moe.experts", "layers.1.mlp.experts"),
    ("deepseek", "q_lora", "layers.1.self_attn.q_b_proj", "layers.1.attn.q_b"),
    ("deepseek", "q_lora", "layers.1.self_attn", "layers.1.attn"),
    ("deepseek", "q_lora", "layers.2.mlp.shared_experts.up_proj", "layers.2.mlp.shared.gate_up"),
    ("cohere", "tied", "layers.1.self_attn.o_proj", "layers.1.attn.o"),
    ("olmo2", "plain", "layers.1.post_feedforward_layernorm", "layers.1.mlp_after"),
    ("gpt_oss", "yarn", "layers.1.mlp.experts.down_proj", "layers.1.mlp.experts"),
    ("llama4", "chunks", "layers.1.feed_forward.router", "layers.1.mlp.router"),
    ("llama4", "chunks", "layers.1.feed_forward.experts.down_proj", "layers.1.mlp.experts"),
    ("qwen3_next", "mixed", "layers.1.linear_attn.out_proj", "layers.1.attn.mixer.o"),
    ("qwen3_next", "mixed", "layers.1.linear_attn.conv1d", "layers.1.attn.mixer.conv"),
    ("falcon_h1", "factors", "layers.1.mamba.in_proj", "layers.1.attn.recurrence.mixer.proj"),
    ("nemotron_h", "mixed", "layers.1.mixer.up_proj", "layers.1.block.up"),
]


@pytest.mark.parametrize(("family", "case", "module", "site"), FAMILIES, ids=lambda word: word)
def test_a_planted_fault_is_found_where_it_is(family, case, module, site, tmp_path):
    """Its own site introduces an error, those around it contain it, those behind it pass it on, and no other one
    introduces any."""
    make(family, case, tmp_path / "right")
    noise = torch.Generator().manual_seed(1)

    part = "kv_b_proj" if site == "layers.1.attn" else ""  # which its kernel runs with attention, in one call

    def change(name, value):
        return value + 0.1 * torch.randn(value.shape, generator=noise) if module in name and part in name else None

    changed = disturb(tmp_path / "right", tmp_path / "wrong", change)
    found = audit(tmp_path / "wrong", tmp_path / "right")
    assert found.first is not None and found.first.site == site
    within = found.first.modules.removeprefix("model.").partition("{")[0].rstrip(".")
    assert within and within in changed
    assert [each.site for each in found.sites if each.role == "introduces"] == [site]
    at = [each.site for each in found.sites].index(site)
    for each in found.sites[:at]:
        inside = each.site.startswith(f"{site}.")
        assert inside or (each.role == "agrees" and not (each.arrived or each.introduced or each.out)), each
    for each in found.sites[at + 1 :]:
        if each.role == "contains":
            assert site.startswith(each.site), each
        else:
            assert each.introduced == 0, each
    assert found.first.arrived == 0 and found.first.out == found.first.introduced > 0.01
    behind = [each for each in found.units if each.layer is not None and each.layer > (found.first.layer or -1)]
    assert site == "head" or all(each.role == "passes on" for each in behind[1:])
    assert found.units[-1].out > 0


def scale(module, factor):
    return lambda name, value: value * factor if module in name else None


def test_a_factor_is_what_is_introduced(folder, tmp_path):
    """A product with 1.1 times its weight returns 1.1 times its result, whatever arrives; attention is linear in v."""
    disturb(folder, tmp_path / "down", scale("layers.0.mlp.down_proj", 1.1))
    found = {each.site: each for each in audit(tmp_path / "down", folder).sites}
    assert found["layers.0.mlp.down"].introduced == pytest.approx(0.1, rel=1e-4)
    assert found["layers.0.mlp.down"].introduced_by_token == pytest.approx(0.1, rel=1e-4)
    assert found["layers.0.mlp"].introduced == pytest.approx(0.1, rel=1e-4)
    assert 0 < found["layers.0"].introduced < 0.1, "a part of the hidden state has the error"
    assert found["layers.0"].out == found["layers.0"].introduced == found["layers.1.attn_norm"].arrived
    disturb(folder, tmp_path / "both", lambda name, value: value * 1.1 if "v_proj" in name else None)
    found = {each.site: each for each in audit(tmp_path / "both", folder).sites}
    for layer in (0, 1):
        assert found[f"layers.{layer}.attn"].introduced == pytest.approx(0.1, rel=1e-3), "a run of its own cache"
        assert found[f"layers.{layer}.attn.o"].introduced == 0
    assert found["layers.0.attn.o"].arrived == pytest.approx(0.1, rel=1e-3)
    assert found["layers.1.attn.qkv"].arrived > 0.001 and found["layers.1.attn.qkv"].role == "introduces"


def test_errors_are_those_of_direct_arithmetic(folder, tmp_path):
    """Of a product, by its inputs in both models and both weights; over both windows together."""
    disturb(folder, tmp_path / "wrong", lambda name, value: value + 0.05 if "o_proj" in name else None)
    with opened(tmp_path / "wrong") as model, opened(folder) as reference:
        windows = draw(model.engine.vocab)
        found = {each.site: each for each in audit_sites(model, reference, windows).sites}
        site, sums = "layers.1.attn.o", torch.zeros(4, dtype=torch.float64)
        for window in windows:
            (x, w, y), (rx, _, ry) = (product(llm, site, window.ids) for llm in (model, reference))
            assert torch.allclose(y, x @ w.T, atol=1e-5)
            pairs = (x - rx, rx), (rx @ w.T - ry, ry)
            sums += torch.tensor([t.double().square().sum().item() for pair in pairs for t in pair])
    assert found[site].arrived == pytest.approx((sums[0] / sums[1]).sqrt().item(), rel=1e-4)
    assert found[site].introduced == pytest.approx((sums[2] / sums[3]).sqrt().item(), rel=1e-4)


def product(llm, site, ids):
    """Input, weight and result of a product in a step over a prompt, by other means than the audit's."""
    seen = {}
    weight = llm.runner.loaded.packed
    op = dict(llm.runner.model.sites())[site]
    (found,) = (value for (i, _), value in weight.items() if i == id(op.weight))
    call = torch.nn.functional.linear

    def watched(x, w, *rest):
        if w.data_ptr() == found.data_ptr():
            seen["x"], seen["y"] = x.clone(), call(x, w, *rest).clone()
        return call(x, w, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", watched)
        llm.logits([ids])
    return seen["x"], found, seen["y"]


def test_a_model_against_itself(folder):
    found = audit(folder, folder)
    assert found.first is None and found.count("agrees") == len(found.sites) == 25
    assert all(each.arrived == each.introduced == each.out == each.out_by_token == 0 for each in found.sites)
    assert [each.site for each in found.units] == ["embed", "layers.0", "layers.1", "norm", "head"]
    assert found.windows == 2 and found.tokens == 2 * TOKENS and found.data()["first"] is None


def test_each_product_introduces_what_int4_costs(folder):
    """And nothing else does: norms, rotation and activations pass errors on."""
    found = audit(folder, folder, {"quantization": "weight_only_int4"})
    for each in found.sites:
        if each.op == "linear" or each.site in ("head",):
            assert 0.001 < each.introduced < 0.2 and each.role == "introduces", each
        elif each.role not in ("contains", "agrees"):
            assert each.introduced == 0, each
    assert found.first.site == "layers.0.attn.qkv" and found.first.arrived == 0
    outs = [each.out for each in found.units]
    assert outs[0] == 0 and outs[1] < outs[2] < outs[3] + outs[2]
    part = next(each for each in found.by_part if each.part == "layer.mlp.down")
    of_both = [each.introduced for each in found.sites if each.site.endswith("mlp.down")]
    assert part.sites == 2 and part.maximum == max(of_both) and part.median == pytest.approx(sum(of_both) / 2)


def test_plans_against_each_other(folder):
    """Kernels against references of the same model: rounding, below the tolerances of the ops."""
    found = audit(folder, folder, other_options={"ops": {"causal_lm": "reference"}})
    assert found.first is None, found.first
    assert {each.reference_kernel for each in found.sites} <= {"reference", "decomposition"}
    assert {each.kernel for each in found.sites} >= {"torch:linear", "torch:add_rms_norm"}
    assert any(each.introduced for each in found.sites)


@pytest.mark.parametrize(("family", "case"), [("llama", "gqa"), ("deepseek", "q_lora"), ("lfm2", "mixed")])
def test_dtypes_against_each_other(family, case, tmp_path):
    make(family, case, tmp_path)
    found = audit(tmp_path, tmp_path, {"dtype": "bfloat16"})
    products = [each for each in found.sites if each.op == "linear"]
    assert products and all(0.0005 < each.introduced < 0.016 for each in products)
    assert {each.threshold for each in products} == {0.016}, "of the less precise dtype"
    assert audit(tmp_path, tmp_path, other_options={"dtype": "bfloat16"}).sites[-1].out < 0.05


def test_a_quantized_cache_is_of_attention(folder):
    """The mixer reads what it has stored, so it introduces the error; no product of it does."""
    options = {"dtype": "bfloat16"}
    found = audit(folder, folder, {**options, "kv_cache_dtype": "int8"}, options, threshold=1e-4)
    assert found.first.site == "layers.0.attn" and found.first.role == "introduces"
    assert [each.site for each in found.sites if each.role == "introduces"] == ["layers.0.attn", "layers.1.attn"]


def test_a_threshold_decides_what_counts(folder, tmp_path):
    for layer, factor in ((0, 1.01), (1, 1.3)):
        source = folder if layer == 0 else tmp_path / "0"
        disturb(source, tmp_path / str(layer), scale(f"layers.{layer}.mlp.down_proj", factor))
    assert audit(tmp_path / "1", folder).first.site == "layers.0.mlp.down"
    found = audit(tmp_path / "1", folder, threshold=0.1)
    assert found.first.site == "layers.1.mlp.down" and found.first.arrived > 0.001
    assert audit(tmp_path / "1", folder, threshold=0.5).first is None


def test_values_that_are_no_numbers_diverge(folder, tmp_path):
    disturb(folder, tmp_path / "wrong", lambda n, v: v * math.inf if "layers.1.mlp.up_proj" in n else None)
    with pytest.warns(match="hold NaN or infinity"):
        found = audit(tmp_path / "wrong", folder)
    assert found.first.site == "layers.1.mlp.gate_up" and found.first.introduced == math.inf
    data = next(each for each in found.data()["sites"] if each["site"] == found.first.site)
    assert data["introduced"] is None and data["role"] == "introduces"


def test_what_is_stored_as_one_is_held_against_its_parts(tmp_path):
    """Phi-3's q, k and v are one tensor; quantized, they are read as one, in a copy of 16 bits part by part."""
    from inferplane.cli.main import main

    make("phi3", "window", tmp_path / "right", intermediate_size=128)
    assert (
        main(["quantize", str(tmp_path / "right"), "--quantization", "weight_only_int8", "--out", str(tmp_path / "q")])
        == 0
    )
    found = audit(tmp_path / "q", tmp_path / "right")
    first = next(each for each in found.sites if each.op == "linear")
    assert first.site == "layers.0.attn.qkv" and "qkv_proj" in first.modules
    assert 0.0005 < first.introduced < 0.02 and found.units[-1].out < 0.1


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_hidden_layers": 3}, "has 2 layers, .* 3"),
        ({"intermediate_size": 96}, r"differ at layers\.0\.mlp\.gate_up: linear with weight of 224 x 64"),
        ({"attention_bias": True}, r"differ at layers\.0\.attn\.qkv: .*, and linear with .* bias of 128"),
        ({"vocab_size": 150}, r"differ at embed: embedding with weight of 160 x 64, and .* 150 x 64"),
    ],
)
def test_models_of_other_structure_are_refused(changes, what, folder, tmp_path):
    make("llama", "gqa", tmp_path, **changes)
    with pytest.raises(UsageError, match=what):
        audit(folder, tmp_path)


def test_experts_against_a_dense_model_are_refused(folder, tmp_path):
    make("mixtral", "plain", tmp_path)
    with pytest.raises(UsageError, match=r"differ at layers\.0\.mlp: gated_mlp, and moe\."):
        audit(folder, tmp_path)


def test_windows_that_do_not_fit(folder):
    with opened(folder) as model, opened(folder, max_num_batched_tokens=40) as reference:
        with pytest.raises(UsageError, match="No windows"):
            audit_sites(model, reference, [])
        with pytest.raises(UsageError, match="A window of 9 tokens"):
            audit_sites(model, reference, draw(160, tokens=9))
        with pytest.raises(UsageError, match="A window of 60 tokens in steps of 40"):
            audit_sites(model, reference, draw(160))
        free = [llm.engine.pools.available for llm in (model, reference)]
        assert free == [llm.engine.pools.total for llm in (model, reference)], "blocks are released after errors"
        assert audit_sites(model, reference, draw(160, tokens=40)).first is None


def test_models_on_several_ranks_are_refused(folder, monkeypatch):
    with opened(folder) as model, opened(folder) as reference, monkeypatch.context() as patch:
        patch.setattr(reference.runner, "ranks", object())
        with pytest.raises(UnsupportedModelError, match="shared by several ranks"):
            audit_sites(model, reference, draw(160))


def test_weights_are_freed_with_the_models(folder):
    """Nothing of an audit holds them in a circle, which only the garbage collector would find."""
    gc.disable()
    try:
        with opened(folder) as model, opened(folder) as reference:
            audit_sites(model, reference, draw(160))
            held = [weakref.ref(value) for value in model.runner.loaded.packed.values()]
        assert held and not [ref for ref in held if ref() is not None]
    finally:
        gc.enable()


def test_the_models_serve_as_before(folder):
    with opened(folder) as model, opened(folder) as reference:
        ids = draw(160)[0].ids
        (before,) = model.logits([ids])
        audit_sites(model, reference, draw(160))
        assert torch.equal(model.logits([ids])[0], before)


def test_no_more_than_a_unit_is_held(folder, monkeypatch):
    """What is recorded of a unit is dropped before the next one runs."""
    with opened(folder) as model, opened(folder) as reference:
        most, begin = 0, ObservedModel.observe

        def observe(self, run, sites):
            nonlocal most
            result, calls = begin(self, run, sites)
            most = max(most, len({site.partition(".")[0] + str(site.split(".")[1:2]) for site in calls}))
            assert not self._calls and not self._observed
            return result, calls

        monkeypatch.setattr(ObservedModel, "observe", observe)
        audit_sites(model, reference, draw(160))
        assert most == 1


def test_calls_of_products_have_their_inputs(folder):
    with opened(folder) as model:
        observed = ObservedModel(model)
        assert observed.units == ["embed", "layers.0", "layers.1", "norm", "head"] and not observed.fused
        assert isinstance(observed.sites["layers.1.mlp.down"].op, Linear)


def test_a_token_with_large_values_hides_no_error(folder, tmp_path):
    """One token's embedding is a thousand times the others': the rms over all rows has it alone."""
    ids = draw(160, count=1)[0].ids

    def change(name, value):
        if "embed_tokens" not in name:
            return None
        large = value.clone()
        large[ids[0]] *= 1000
        return large

    disturb(folder, tmp_path / "large", change)
    noise = torch.Generator().manual_seed(1)
    faulty = {"layers.0.self_attn.o_proj": 0.05, "layers.0.mlp.down_proj": 0.05}

    def wrong(name, value):
        size = next((s for module, s in faulty.items() if module in name), 0)
        return value + size * torch.randn(value.shape, generator=noise) if size else None

    disturb(tmp_path / "large", tmp_path / "wrong", wrong)
    with opened(tmp_path / "wrong") as model, opened(tmp_path / "large") as reference:
        found = {each.site: each for each in audit_sites(model, reference, [Window("a", ids)], 0.05).sites}
    layer = found["layers.0"]
    assert layer.introduced < 0.01 < 0.1 < layer.introduced_by_token == layer.out_by_token
    assert found["layers.0.attn.o"].role == "introduces" and layer.role == "contains"
    assert found["layers.1"].introduced == 0 and found["layers.1"].role == "passes on"


@pytest.mark.parametrize(("columns", "by_token"), [(1, 1.0), (64, math.sqrt(1.25 / 2))])
def test_errors_by_token(columns, by_token):
    """Two tokens with errors of 1 and 0.5, the first of a hundredth of the second's size; few columns have no form of
    their own, since they may be near 0 by chance."""
    reference = torch.ones(3, columns) * torch.tensor([[0.01], [1.0], [0.0]])
    found = Difference()
    found.add([reference * torch.tensor([[2.0], [1.5], [1.0]])], [reference])
    total = math.sqrt((0.01**2 + 0.5**2) / (0.01**2 + 1))
    assert found.error == pytest.approx(total, rel=1e-6)
    assert found.error_by_token == pytest.approx(total if columns == 1 else by_token, rel=1e-6)


def test_experts_in_another_order_are_equal():
    """The order of a token's experts is free, their weights are not."""
    op = MoERoute(None, 2)
    weights, ids = torch.tensor([[0.7, 0.3], [0.6, 0.4]]), torch.tensor([[5, 1], [0, 2]])
    found = Difference()
    found.add(list_results(op, (weights.flip(1), ids.flip(1))), list_results(op, (weights, ids)))
    assert found.error == 0
    found.add(list_results(op, (weights.flip(1), ids)), list_results(op, (weights, ids)))
    assert found.error > 0.3

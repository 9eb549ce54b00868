"""Sparse attention by the engine, in all that a step may be: chunks, single tokens, drafts, captured steps."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from inferplane.binding import run_case
from inferplane.conformance import stepping
from inferplane.conformance.subject import Subject
from inferplane.engine import InferplaneWarning
from inferplane.ops import Draw, IndexDims, IndexSelect, LightningIndexer, Linear
from inferplane.ops.op import placeholder
from inferplane.plugins import host
from inferplane.types.batch import make_batch
from inferplane_npu.graphs import UpdatableGraph
from tests.vendors.configs import FAMILIES, model
from tests.vendors.engine import serve
from tests.vendors.npu import chip
from tests.vendors.npu.emulated import EMULATOR
from tests.vendors.npu.profile import CHOSEN_LATENTS
from tests.vendors.npu.test_graphs import Runtime, batches
from tests.vendors.profile import DRAFTS, in_vendor_dtypes

pytestmark = [in_vendor_dtypes, pytest.mark.skipif(chip.ARCH == "310p", reason="it has none of the operators")]
INDEXERS = {"910b": "torch_npu:lightning_indexer_rotated_int8", "950": "torch_npu:lightning_indexer_int8"}


@pytest.mark.parametrize("speculative", [None, DRAFTS], ids=["plain", "drafts"])
@pytest.mark.parametrize("family", CHOSEN_LATENTS)
def test_serves_a_cache_in_int8(family, speculative):
    """Index keys and latents in the vendor's own forms, without a hot op on torch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        plan = serve("npu", chip.DTYPE, family, strict=True, kv_cache_dtype="int8", speculative_config=speculative)
    layouts = {layout["layout"] for layout in plan["kv_layouts"]}
    assert layouts == {"npu_latent_tiles_128_int8", "npu_index_nd_128_int8"}
    chosen = {s["op"]: s["chosen"]["kernel"] for s in plan["sites"]}
    assert chosen["lightning_indexer"] == INDEXERS[chip.ARCH]
    for op in ("sparse_mla_absorbed", "sparse_mla_expanded"):
        assert chosen[op] == f"torch_npu:{op}_int8"


@pytest.mark.parametrize(
    ("options", "layouts"),
    [
        ({"index_key_dtype": "int8"}, {"npu_latent_nd_128", "npu_index_nd_128_int8"}),
        ({"index_key_dtype": "none", "kv_cache_dtype": "int8"}, {"npu_latent_tiles_128_int8", "npu_index_nd_128"}),
    ],
    ids=["keys", "latents"],
)
def test_serves_one_of_both_in_int8(options, layouts):
    plan = serve("npu", chip.DTYPE, "deepseek_v32", strict=True, **options)
    assert {layout["layout"] for layout in plan["kv_layouts"]} == layouts
    hot = {s["op"]: s["chosen"]["kernel"] for s in plan["sites"] if s["op"].startswith("sparse_mla_a")}
    assert all(kernel.startswith("torch_npu:sparse_mla_absorbed") for kernel in hot.values()) and hot


@pytest.mark.parametrize("scheme", ["weight_only_int8", "a8w8"])
def test_serves_weights_and_a_cache_in_int8(scheme):
    """The indexer's products are within its kernel, whatever the other layers' activations are."""
    family = "deepseek_v32"
    plan = serve("npu", chip.DTYPE, family, strict=True, kv_cache_dtype="int8", quantization=scheme)
    found = {s["op"]: s["chosen"]["kernel"] for s in plan["sites"] if s["op"] in ("lightning_indexer", "index_select")}
    assert found == {"lightning_indexer": INDEXERS[chip.ARCH]}


@pytest.mark.parametrize("bias", [False, True], ids=["served", "with_biases_refused"])
def test_an_indexer_with_weights_in_int8(bias):
    """Its choice is the oracle's."""
    subject = Subject.of(host(), "npu", str(chip.DTYPE).removeprefix("torch."))
    subject.open()
    (kernel,) = [k for k in subject.kernels if k.name == INDEXERS[chip.ARCH]]
    (sample,) = [s for s in LightningIndexer.samples() if s.label == "v32_spread"]

    def product(like):
        return Linear(placeholder(*like.weight.shape, format="int8_row"), placeholder(128) if bias else None)

    quantized = replace(sample.op, wq_b=product(sample.op.wq_b), wk=product(sample.op.wk))
    outcome = run_case(kernel, replace(sample, op=quantized), subject.bench(chip.DTYPE), seed=3)
    assert outcome.served != bias
    assert bias or outcome.passed, outcome.detail


def test_dense_latents_in_int8_stay_in_cores_layout():
    """No kernel of dense latent attention reads tiles."""
    plan = serve("npu", chip.DTYPE, "deepseek_v3", kv_cache_dtype="int8")
    assert {layout["layout"] for layout in plan["kv_layouts"]} == {"paged_128_int8"}


def calls_indexer(sequences, top=64):
    """Whether `index_select` calls the operator for sequences of (new, before) tokens; its result is checked."""
    subject = Subject.of(host(), "npu", str(chip.DTYPE).removeprefix("torch."))
    subject.open()
    name = {"910b": "torch_npu:index_select", "950": "torch_npu:index_select_half"}[chip.ARCH]
    (kernel,) = [k for k in subject.kernels if k.name == name]
    (sample,) = [s for s in IndexSelect.samples() if s.label == "v32_decode"]
    dims = IndexDims(64, 128, 64, top)

    def inputs(draw: Draw):
        batch, kv = draw.step(dims.request, sequences, written=True)
        w = draw.normal(batch.tokens, dims.heads, dtype=torch.float32)
        return draw.normal(batch.tokens, dims.heads, dims.dim), w, batch, kv

    calls = []
    with EMULATOR.listen(lambda name, *call: calls.append(name)):
        made = replace(sample, op=IndexSelect(dims, dims.request), inputs=inputs)
        outcome = run_case(kernel, made, subject.bench(chip.DTYPE), seed=3)
    assert outcome.served and outcome.passed, outcome.detail
    return "npu::npu_lightning_indexer" in calls


def test_nothing_is_scored_where_all_tokens_are_chosen():
    assert not calls_indexer([(1, 63), (3, 20)])
    assert calls_indexer([(1, 64), (3, 20)])


@pytest.mark.parametrize("tokens", [1, 3], ids=["single", "drafts"])
@pytest.mark.parametrize("family", CHOSEN_LATENTS)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_captured_steps_are_the_eager_ones(family, kv_dtype, tokens):
    """No call waits for lengths from the host. The step is captured when every sequence has few enough tokens that all
    are chosen, and replayed when one has more.
    """
    if chip.ARCH == "950" and family != "deepseek_v32":
        pytest.skip("the 910b's kernels")
    subject = Subject.of(host(), "npu", str(chip.DTYPE).removeprefix("torch."))
    tree = model({**FAMILIES[family], "index_topk": 249 + tokens})
    weights = stepping.draw_weights(tree, chip.DTYPE, steady_routes=True)
    eager, captured = (stepping.on_device(subject, tree, chip.DTYPE, weights, 384, kv_dtype) for _ in range(2))
    for bound in (eager, captured):
        draw = Draw(3, chip.DTYPE)
        for kv in bound.cache.layers:
            slots = torch.arange(bound.cache.blocks * 128)
            kv.write(slots, *draw.kv_entries(kv.request, len(slots)))

    def batch(n):
        queries = batches(n, tokens)
        widest = [replace(q, blocks=[*q.blocks, *[0] * (3 - len(q.blocks))]) for q in queries]
        return make_batch(widest, block_tokens=128, device="cpu")

    with torch.inference_mode():
        graph = UpdatableGraph(Runtime(), lambda step: captured.steps["decode"](step, captured.cache)[0], batch(0))
        eager.steps["decode"](batch(0), eager.cache)
        assert not graph.recorder.tasks
        for n in (1, 2, 3):
            graph.update(batch(n))
            want = eager.steps["decode"](batch(n), eager.cache)[0]
            assert torch.equal(graph.replay(), want), f"step {n}"

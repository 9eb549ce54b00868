"""What Inferplane writes is of the form that docs/schemas promises, and the schemas refuse what is not."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import jsonschema
import pytest
import torch

from inferplane.binding import PlanSettings, bind, explain, signature, write_lock
from inferplane.conformance.configs import TINY, model
from inferplane.kernels.composed import composed_kernels
from inferplane.kvcache import paged_layout
from inferplane.models import Build, Config, build
from inferplane.quant import format_of
from inferplane.types import Packing, When
from tests.house.rules import REPOSITORY

FOLDER = REPOSITORY / "docs" / "schemas"
SCHEMAS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("*.json")}


def check(name: str, data: object) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(json.dumps(data)))


@pytest.mark.parametrize(
    ("name", "version"),
    [("bench", 1), ("bench_serve", 1), ("explain", 2), ("evidence", 1), ("lock", 1), ("estimate", 1)],
)
def test_schemas_are_schemas(name, version):
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    assert SCHEMAS[name]["properties"]["schema"]["const"] == version
    assert "schema" in SCHEMAS[name]["required"]


def plan_with_everything():
    """Weights kept twice, weights expanded, two cache layers, rejected kernels."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = Config({**TINY["deepseek_v3"], "quantization_config": fp8})
    tree = build(Build(config, format_of=format_of(fp8, None), positions=64))
    turned = When(
        needs=(("a plain product", lambda op: op.activation_quant is None and op.out_dtype is None),),
        step_kinds=("decode",),
    )
    packing = Packing("made.t", lambda w: w.t().contiguous())
    linear = next(k for k in composed_kernels() if k.name == "torch:linear")
    kernels = [*composed_kernels(), replace(linear, provider="made", when=turned, packs={"weight": packing}, rank=60)]
    settings = PlanSettings("made", torch.float32, "made1", max_repacked_fraction=None, assumed=True)
    return bind(tree, kernels, settings, lambda request: [paged_layout(16)])


def test_explain():
    data = explain(plan_with_everything(), "tiny")
    assert data["copies"] and data["dequantized"] and data["kv_layouts"]
    assert any(site["rejected"] for site in data["sites"])
    check("explain", data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.update(schema=3),
        lambda d: d.pop("arch"),
        lambda d: d.update(more=1),
        lambda d: d.update(sites=[]),
        lambda d: d["sites"][0].update(step_kind="prefill"),
        lambda d: d["sites"][0].update(signature="zz"),
        lambda d: d["sites"][0]["chosen"].update(rank=101),
        lambda d: d["sites"][0]["chosen"].update(why=""),
        lambda d: next(s for s in d["sites"] if s["rejected"])["rejected"][0].update(reason=""),
        lambda d: d["kv_layouts"][0].update(window=0),
        lambda d: d["copies"][0].update(packings=["one"]),
        lambda d: d["dequantized"][0].update(weights=0),
    ],
)
def test_what_is_not_explain(spoil):
    data = copy.deepcopy(explain(plan_with_everything(), "tiny"))
    spoil(data)
    with pytest.raises(jsonschema.ValidationError):
        check("explain", data)


def test_lock(tmp_path):
    tree = model(TINY["llama"])
    choices = {f"{op.name}|decode|{signature(op)}": "made:kernel" for _, op in tree.sites()}
    write_lock(tmp_path / "lock.json", {"device": "made", "torch": "2.13.0"}, choices)
    data = json.loads((tmp_path / "lock.json").read_text())
    check("lock", data)
    for wrong in (
        {**data, "fingerprint": {}},
        {**data, "choices": {"linear": "made:kernel"}},
        {**data, "choices": {k: 1 for k in choices}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            check("lock", wrong)


EVIDENCE = {
    "schema": 1,
    "backend": "family:variant",
    "level": "L3",
    "date": "2026-11-20",
    "commit": "a" * 40 + "+",
    "versions": {"inferplane": "0.1.0", "torch": "2.13.0"},
    "hardware": "a card",
    "command": "pytest",
    "results": [
        {"op": "linear", "case": "ops/linear/x", "status": "passed", "error": 0.001, "tolerance": 0.016},
        {
            "feature": "models",
            "case": "models/x",
            "status": "not run",
            "error": None,
            "tolerance": None,
            "detail": "no",
        },
    ],
}


def test_evidence():
    check("evidence", EVIDENCE)
    first = EVIDENCE["results"][0]
    for change in (
        {"level": "L9"},
        {"date": "20.11.2026"},
        {"commit": "main"},
        {"versions": {}},
        {"results": []},
        {"results": [{**first, "status": "skipped"}]},
        {"results": [{**first, "feature": "both"}]},
        {"results": [{k: v for k, v in first.items() if k != "op"}]},
        {"results": [{**first, "error": -1}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            check("evidence", {**EVIDENCE, **change})

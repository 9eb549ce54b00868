"""The plan as data and as text; made without a tensor."""

import json

import jsonschema
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from inferplane.binding import explain, explain_text, signature
from inferplane.ops import OPS
from inferplane.types import Packing, When
from tests.unit.support.small import BF16, kernel, plan, tiny_llama, tiny_v3

TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}


def record(**fields):
    return {"type": "object", "properties": fields, "required": sorted(fields), "additionalProperties": False}


def rows(**fields):
    return {"type": "array", "items": record(**fields)}


SCHEMA_2 = record(
    schema={"const": 2},
    model=TEXT,
    device=TEXT,
    dtype={"enum": ["float32", "bfloat16", "float16"]},
    arch=TEXT,
    assumed=FLAG,
    kv_layouts=rows(kind=TEXT, heads=COUNT, dim=COUNT, window={"type": ["integer", "null"]}, layout=TEXT),
    weight_bytes=COUNT,
    sites=rows(
        site=TEXT,
        op={"enum": sorted(OPS)},
        step_kind={"enum": ["decode", "mixed"]},
        signature={"type": "string", "pattern": "^[0-9a-f]{12}$"},
        chosen=record(
            kernel=TEXT,
            provider=TEXT,
            rank=COUNT,
            why={"type": "string", "minLength": 3},
            hot=FLAG,
            ambiguous=FLAG,
            decided_by={"enum": ["pin", "lock", "rank"]},
            weights_dequantized=FLAG,
            note=TEXT,
            kv_dtype_unread=TEXT,
        ),
        rejected=rows(kernel=TEXT, rank=COUNT, reason={"type": "string", "minLength": 3}),
    ),
    copies=rows(
        weight=TEXT,
        packings={"type": "array", "items": TEXT},
        uses=COUNT,
        extra_bytes=COUNT,
        **{"for": {"type": "object"}},
    ),
    dequantized=rows(op=TEXT, format=TEXT, weights=COUNT),
    activation_quant_skipped=rows(op=TEXT, activation_quant=TEXT, sites=COUNT, reason=TEXT),
    expanded_bytes=COUNT,
    on_torch=rows(op=TEXT, kernels={"type": "array", "items": TEXT, "minItems": 1}),
)
"""What readers of schema 2 rely on; changing it means schema 3."""

LINEAR = kernel("linear", note="measured once")
LOSER = kernel("linear", "loser", 20, when=When(dtypes=(BF16,)))


@pytest.mark.parametrize(
    "model", [tiny_llama(), tiny_v3(mtp=True), tiny_v3(format="fp8_block")], ids=["llama", "v3", "fp8"]
)
def test_schema_2(model):
    ks = [LINEAR, LOSER, kernel("lm_head", packs={"weight": Packing("v.t")}), kernel("lm_head", "other")]
    told = json.loads(json.dumps(explain(plan(model, *ks, arch="chip9", assumed=True), "m")))
    jsonschema.validate(told, SCHEMA_2)
    assert told["model"] == "m" and told["arch"] == "chip9" and told["assumed"] is True and told["device"] == "toy"
    assert told["kv_layouts"][0]["layout"] == "paged_16"


def at(told, site, kind="decode"):
    (entry,) = [s for s in told["sites"] if s["site"] == site and s["step_kind"] == kind]
    return entry


def test_a_site_tells_the_choice_and_every_loser():
    model = tiny_llama()
    told = explain(plan(model, LINEAR, LOSER))
    entry = at(told, "layers.0-2.mlp.down")
    assert entry["op"] == "linear" and entry["signature"] == signature(model.layers[0].mlp.down)
    want = {"kernel": "vendor:linear", "provider": "vendor", "rank": 90, "why": "rank 90", "note": "measured once"}
    assert want.items() <= entry["chosen"].items() and entry["chosen"]["hot"] is True
    assert entry["rejected"] == [
        {"kernel": "loser:linear", "rank": 20, "reason": "dtype float32 is not among bfloat16"}
    ]
    assert at(told, "")["chosen"]["kernel"] == "decomposition" and at(told, "norm")["chosen"]["provider"] == "core"
    assert [s["step_kind"] for s in told["sites"]] == ["decode"] * (len(told["sites"]) // 2) + ["mixed"] * (
        len(told["sites"]) // 2
    )


def shown(p, prefix="layers"):
    sites = [s["site"] for s in explain(p)["sites"] if s["step_kind"] == "decode"]
    return [s for s in sites if s.startswith(prefix) and s.count(".") == 1]


def test_equal_layers_are_one_range():
    assert shown(plan(tiny_llama(num_hidden_layers=61), LINEAR)) == ["layers.0-60"]
    assert shown(plan(tiny_v3(num_hidden_layers=9, first_k_dense_replace=3), LINEAR)) == ["layers.0-2", "layers.3-8"]
    p = plan(tiny_llama(num_hidden_layers=6), LINEAR, pins={"layers.2.mlp.down": "reference"})
    assert shown(p) == ["layers.0-1", "layers.2", "layers.3-5"]
    p = plan(tiny_llama(num_hidden_layers=6), LINEAR, pins={"layers.*.down": "reference"})
    assert shown(p) == ["layers.0-5"], "pinned alike is bound alike"
    assert shown(plan(tiny_v3(mtp=True), LINEAR), "mtp") == ["mtp.0"]


def test_text_is_one_line_a_site():
    p = plan(
        tiny_llama(), LINEAR, LOSER, kernel("attention", "a"), kernel("attention", "b"), arch="chip9", assumed=True
    )
    lines = explain_text(p, "Tiny").splitlines()
    assert lines[0] == "Tiny in float32, planned for chip9 (assumed)"
    assert lines[1].startswith("weights 0.") and lines[1].endswith(" MiB, KV layout paged_16")
    assert "steps: decode, mixed" in lines, "columns that are alike are shown once"
    (down,) = [x for x in lines if x.split()[:1] == ["down"]]
    assert down.split() == ["down", "linear", "vendor:linear", "rank", "90"] and down.startswith("          down ")
    (layer,) = [x for x in lines if "layers.0-2" in x]
    assert layer.split()[1:4] == ["decoder_layer", "its", "parts"]
    marked = [x.split()[1] for x in lines if x.startswith("!")]
    assert marked == ["few", "many", "head"], "ambiguous sites and hot references"
    assert max(map(len, lines)) <= 100 and not any(x != x.rstrip() for x in lines)
    assert sum(" not " in x for x in lines) == 0
    assert explain_text(plan(tiny_llama(), LINEAR), "Tiny").splitlines()[0] == "Tiny in float32, bound on toy"
    verbose = explain_text(p, verbose=True)
    assert "not loser:linear (rank 20): dtype float32 is not among bfloat16" in verbose


def test_text_shows_columns_that_differ():
    p = plan(tiny_llama(), kernel("linear", when=When(step_kinds=("decode",))))
    text = explain_text(p)
    assert "steps: decode\n" in text and "steps: mixed\n" in text


def test_text_tells_copies_and_expansions():
    packed = kernel("lm_head", packs={"weight": Packing("v.t")})
    text = explain_text(plan(tiny_v3(format="fp8_block", tie_word_embeddings=True), LINEAR, packed))
    assert (
        f"stored in 2 packings (canonical, v.t): 1 weight such as model.embed_tokens.weight, {97 * 64 * 4} bytes more"
        in text
    )
    assert "weights of format fp8_block, which no kernel of linear accepts here" in text


class Nothing(TorchDispatchMode):
    """Fails on every operation that makes or touches a tensor."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        raise AssertionError(f"{function} while binding")


def test_no_tensor_is_made_before_loading():
    big = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256, "num_hidden_layers": 80}
    with Nothing():
        with pytest.raises(AssertionError, match="while binding"):
            torch.empty(0, device="meta")
        for model in (tiny_llama(**big), tiny_v3(mtp=True)):
            p = plan(
                model,
                LINEAR,
                kernel("attention", target="absent.runtime:attention"),
                max_repacked_fraction=0.05,
                dtype=BF16,
            )
            explain(p)
            explain_text(p, verbose=True)
    assert explain(plan(tiny_llama(**big), dtype=BF16))["weight_bytes"] > 100e9

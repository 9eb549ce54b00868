"""Models on the mock give the cpu device's logits and tokens, through `LLM`, whatever the mock overrides."""

from __future__ import annotations

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.conformance.configs import TINY
from tests.e2e.suite import conformance, environment, told
from tests.e2e.tiny_models import make, prompts
from tests.families.cases import make as make_family
from tests.mock_device import kernels, mock_device
from tests.mock_device.conftest import PLUGIN

pytestmark = pytest.mark.filterwarnings("ignore:.*run on their slow reference")

CASES = ["llama-tied_llama3", "llama-attention_bias", "deepseek-q_lora", "deepseek-q_full"]
KERNELS = {
    "mock:norm": {"mock:add_rms_norm", "mock:rms_norm"},
    "mock:block": {"mock:add_rms_norm", "mock:{kind}_block"},
    "mock:layer": {"mock:add_rms_norm", "mock:decoder_layer"},
    "mock:decode": {"mock:add_rms_norm", "mock:{kind}_block", "mock:{mlp}", "mock:gated_mlp", "mock:decoder_layer"},
}
LAYOUTS = {"gqa": "mock_bhtd_48", "mla": "mock_bdt_48"}


@pytest.fixture(scope="module", params=CASES)
def usual(request, tmp_path_factory):
    """A saved model, and what the cpu device makes of it."""
    family, case = request.param.split("-")
    folder = tmp_path_factory.mktemp(request.param)
    make(family, case, folder)
    many = prompts(100, (61, 9, 30))
    with LLM(folder, device="cpu", dtype="float32", max_num_seqs=4) as llm:
        return folder, "gqa" if family == "llama" else "mla", many, llm.logits(many), tokens(llm, many)


def tokens(llm: LLM, many: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    return [result.token_ids for result in llm.generate(many, params)]


@pytest.mark.parametrize("device", KERNELS)
def test_same_logits_and_tokens(usual, device, mock):
    folder, kind, many, logits, greedy = usual
    with LLM(folder, device=device, dtype="float32", max_num_seqs=4, max_num_batched_tokens=40) as llm:
        for chunk in (None, 7):
            for got, want in zip(llm.logits(many, chunk_tokens=chunk), logits, strict=True):
                assert got.device == torch.device("cpu")
                assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        assert tokens(llm, many) == greedy
        plan = llm.explain()
    chosen = {site["chosen"]["kernel"] for site in plan["sites"]}
    absent = {"mock:rms_norm"} if kind == "gqa" else set()  # without a norm of its own, only the fused one is there
    expected = {
        name.format(kind=kind, mlp="gated_mlp" if kind == "gqa" else "mixture") for name in KERNELS[device]
    } - absent
    assert {name for name in chosen if name.startswith("mock:")} == expected
    own = device != "mock:norm" or kind == "mla"
    assert [entry["layout"] for entry in plan["kv_layouts"]] == [LAYOUTS[kind] if own else "paged_48"]
    if device == "mock:decode":
        kinds = {s["step_kind"] for s in plan["sites"] if s["chosen"]["kernel"] == "mock:decoder_layer"}
        assert kinds == {"decode"}
        # Norms, which are small, are packed for one and not for the other; matrices are shared.
        assert all("norm" in copy["weight"] for copy in plan["copies"])


FEATURES = {
    "cuts": {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 5, "n": 2},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "kept_from_ending": {
        "temperature": 0.0,
        "min_tokens": 4,
        "stop_token_ids": list(range(0, 90)),
        "logit_bias": {7: 3.0},
    },
    "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
}
PUBLISHED_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
SPECULATION = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
}


@pytest.mark.parametrize("case", [("deepseek_v32", "plain"), ("glm_moe_dsa", "shared")], ids="-".join)
def test_attention_over_chosen_tokens(case, mock, tmp_path):
    """Latents in the device's own layout, index keys in core's: no kernel of the device is for them."""
    make_family(*case, tmp_path)
    many = prompts(160, (61, 9, 30))
    with LLM(tmp_path, device="cpu", dtype="float32", max_num_seqs=4) as llm:
        logits, greedy = llm.logits(many), tokens(llm, many)
    with LLM(tmp_path, device="mock:layer", dtype="float32", max_num_seqs=4, max_num_batched_tokens=40) as llm:
        for got, want in zip(llm.logits(many, chunk_tokens=7), logits, strict=True):
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        assert tokens(llm, many) == greedy
        layouts = {entry["kind"]: entry["layout"] for entry in llm.explain()["kv_layouts"]}
    assert layouts == {"mla": "mock_bdt_48", "index_keys": "paged_48"}


def test_attention_to_compressed_entries(mock, tmp_path):
    """All parts in core's layouts of the device's block size, 48 tokens, of which an entry stands for 4, or for 128:
    then not every block has an entry of its own."""
    make_family("deepseek_v4", "all", tmp_path, index_n_heads=24, compress_rates=PUBLISHED_RATES)
    many = prompts(160, (150, 9, 60))
    with LLM(tmp_path, device="cpu", dtype="float32", max_num_seqs=4) as llm:
        logits, greedy = llm.logits(many), tokens(llm, many)
    with LLM(tmp_path, device="mock:layer", dtype="float32", max_num_seqs=4, max_num_batched_tokens=40) as llm:
        for got, want in zip(llm.logits(many, chunk_tokens=7), logits, strict=True):
            assert (got - want).abs().max() <= 1e-5 * want.abs().max()
        assert tokens(llm, many) == greedy
        assert {entry["layout"] for entry in llm.explain()["kv_layouts"]} == {"paged_48"}


@pytest.mark.parametrize("feature", [*FEATURES, *SPECULATION])
def test_what_the_engine_adds_reads_nothing_either(feature, mock):
    """Sampling, penalties, log probabilities, drafts: a device tensor that the host reads in place raises here."""
    config = {**TINY["deepseek_v3"], "num_nextn_predict_layers": 1}
    many, params = (
        prompts(199, (30, 3, 12)),
        SamplingParams(max_tokens=8, **FEATURES.get(feature, {"temperature": 0.0})),
    )
    found = []
    for device in ("cpu", "mock:block"):
        options = {"load_format": "dummy", "kv_cache_bytes": 1 << 22, "dtype": "float32"}
        with LLM(config, device=device, speculative_config=SPECULATION.get(feature), **options) as llm:
            results = llm.generate(many, params)
        assert all(result.finish_reason in ("length", "stop") for result in results), results
        found.append([(result.token_ids, [sample.token_ids for sample in result.samples]) for result in results])
    assert found[0] == found[1]


def test_a_second_copy_is_refused(mock, monkeypatch):
    """A layer for decode steps alone would keep the MLPs' weights in a second packing: it is refused, in bytes."""
    monkeypatch.setattr(mock_device.Decode, "declared", [*kernels.NORMS, *kernels.BLOCKS, kernels.DECODE_LAYER])
    with LLM(TINY["llama"], device="mock:decode", load_format="dummy", kv_cache_bytes=1 << 20) as llm:
        sites = [s for s in llm.explain()["sites"] if s["op"] == "decoder_layer" and s["step_kind"] == "decode"]
    reasons = {loser["reason"] for site in sites for loser in site["rejected"]}
    assert len(reasons) == 1 and "would keep a second copy of model.layers.0.mlp" in reasons.pop()


@pytest.mark.parametrize(
    ("device", "selection"),
    [
        ("mock:norm", "not two_layers and not kvcache and not float32"),
        ("mock:block", "not two_layers and not kvcache and not bfloat16"),
        ("mock:decode", "not two_layers and not kvcache and not bfloat16"),
    ],
)
def test_conformance(device, selection, mock, tmp_path):
    """`make test` runs the whole suite on mock:layer."""
    done = conformance(device, "-k", selection, cwd=tmp_path, env=environment(PLUGIN))
    assert done.returncode == 0, told(done)
    assert " passed" in done.stdout and "failed" not in done.stdout

"""Models whose attention reads chosen tokens: as dense ones where all are chosen, with drafts, and what they keep."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM, SamplingParams
from inferplane.errors import CheckpointError, UsageError
from inferplane.models import Build, Config, build
from inferplane.types import IndexedCache
from tests.e2e.checkpoints import FP8, edit_config, encode_fp8
from tests.e2e.drafters import with_mtp
from tests.e2e.tiny_models import prompts
from tests.families.cases import config_of, make

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 160, "max_num_seqs": 4}
MTP = {"method": "mtp", "num_speculative_tokens": 3, "only_if_faster": False}
CASES = [("deepseek_v32", "plain"), ("glm_moe_dsa", "pattern"), ("glm_moe_dsa", "each")]


def logits(folder, many, **options):
    with LLM(folder, **{**OPTIONS, **options}) as llm:
        return llm.logits(many, chunk_tokens=37)


@pytest.mark.parametrize("top", [100, 101, 512])
def test_where_all_tokens_are_chosen_it_is_dense(top, tmp_path):
    make("deepseek_v32", "plain", tmp_path / "sparse", index_topk=top)
    config = json.loads((tmp_path / "sparse" / "config.json").read_text())
    dense = {**config, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "config.json").write_text(json.dumps(dense))
    tensors = load_file(tmp_path / "sparse" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".indexer." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, tmp_path / "dense" / "model.safetensors")
    many = prompts(160, (101, 40, 1))
    for ours, theirs in zip(logits(tmp_path / "sparse", many), logits(tmp_path / "dense", many)):
        rows = slice(0, top)  # a query at position p chooses among p + 1 tokens
        assert (ours[rows] - theirs[rows]).abs().max() <= 1e-5 * theirs.abs().max()
        assert (len(ours) <= top) == torch.allclose(ours, theirs, atol=float(1e-5 * theirs.abs().max()))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_drafts_of_its_own_layer_change_no_token(case, tmp_path):
    make(*case, tmp_path)
    with_mtp(tmp_path, follows_tokens=True)
    vocab = json.loads((tmp_path / "config.json").read_text())["vocab_size"]
    many, params = prompts(vocab, (70, 9, 33)), SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM(tmp_path, **OPTIONS) as llm:
        want = [r.token_ids for r in llm.generate(many, params)]
        assert not llm.runner.loaded.unused
    with LLM(tmp_path, **OPTIONS, speculative_config=MTP) as llm:
        assert isinstance(llm.runner.draft_cache(0), IndexedCache)
        assert [r.token_ids for r in llm.generate(many, params)] == want
        stats = llm.engine.stats()
        assert stats["spec_decode_num_draft_tokens_total"] > stats["spec_decode_num_accepted_tokens_total"] > 0


def test_fp8_blocks_as_published(tmp_path):
    """Projections of attention and of the indexer in FP8, `weights_proj` in float32, also in a 16-bit plan."""
    make("deepseek_v32", "plain", tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    stored, values = encode_fp8(tensors)
    in_fp8 = {name for name in stored if name.endswith("_scale_inv") and ".indexer." in name}
    assert in_fp8 == {
        f"model.layers.{i}.self_attn.indexer.{n}.weight_scale_inv" for i in range(2) for n in ("wq_b", "wk")
    }
    found = []
    for name, held, changes in (("fp8", stored, {"quantization_config": FP8}), ("values", values, {})):
        (tmp_path / name).mkdir()
        config = (tmp_path / "plain" / "config.json").read_text()
        (tmp_path / name / "config.json").write_text(config)
        edit_config(tmp_path / name, **changes)
        save_file({n: t.contiguous() for n, t in held.items()}, tmp_path / name / "model.safetensors")
        with LLM(tmp_path / name, **OPTIONS) as llm:
            assert not llm.runner.loaded.unused
            found.append(llm.logits(prompts(160, (90,)))[0])
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[1].abs().max()
    with LLM(tmp_path / "fp8", **{**OPTIONS, "dtype": "bfloat16"}) as llm:
        weight = llm.runner.model.layers[0].attn.indexer.weights_proj.weight
        assert weight.dtype is torch.float32 and llm.logits(prompts(160, (20,)))[0].isfinite().all()


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8", "int4"])
def test_memory_is_the_sum_of_its_groups(kv_dtype, tmp_path):
    """Of four layers two choose: four keep latents, two index keys, which have at least 8 bits."""
    make("glm_moe_dsa", "shared", tmp_path)
    with LLM(tmp_path, **{**OPTIONS, "dtype": "bfloat16"}, kv_cache_dtype=kv_dtype) as llm:
        runner, cache = llm.runner, llm.runner.cache
        kinds = [kv.request.kind for kv in cache.layers]
        assert kinds == ["mla", "index_keys", "mla", "mla", "index_keys", "mla"]
        requests = runner.kv_requests()
        each = {r: runner.plan.layouts[r].bytes_per_block(r, torch.bfloat16) for r in requests}
        assert runner.block_bytes() == sum(each[r] for r in requests) == 4 * each[requests[0]] + 2 * each[requests[1]]
        stored = {"auto": 2 * 32, "fp8": 32 + 4, "int8": 32 + 4, "int4": 32 + 4}[kv_dtype]
        assert each[requests[1]] == runner.block_tokens * stored
        held = sum(sum(t.nbytes for t in kv.list_tensors()) for kv in cache.storages())
        assert held == cache.blocks * runner.block_bytes()
        indexers = [layer.attn.indexer for layer in runner.model.layers if layer.attn.indexer is not None]
        assert [one.spread is not None for one in indexers] == [kv_dtype != "auto"] * 2
        places = [place.cache for place in cache.by_layer]
        assert len({id(place.selection) for place in places}) == 1
        assert [place.index_keys is None for place in places] == [False, True, False, True]
        assert runner.describe_caches()["kv_tables"] == {
            "tables": [{"window": None, "layers": 4, "pool": 0}],
            "shared_because": "",
            "index_keys": 2,
        }
        assert "; 2 layers also keep index keys" in runner.explain_text()
        assert len(llm.generate(prompts(160, (70,)), SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids) == 8


@pytest.mark.parametrize(("own", "cache", "stored", "spread"), [
    ("auto", "fp8", "fp8", True), ("none", "fp8", "auto", False), ("int8", "auto", "int8", True),
    ("fp8", "int4", "fp8", True), ("none", "int4", "auto", False),
])  # fmt: skip
def test_index_keys_have_a_dtype_of_their_own(own, cache, stored, spread, tmp_path):
    """Entries beside them have the cache's; only quantized keys go through a Hadamard matrix first."""
    make("glm_moe_dsa", "shared", tmp_path)
    options = {**OPTIONS, "dtype": "bfloat16", "kv_cache_dtype": cache, "index_key_dtype": own}
    with LLM(tmp_path, **options) as llm:
        layouts = {request.kind: layout.kv_dtype for request, layout in llm.runner.plan.layouts.items()}
        assert layouts == {"mla": cache, "index_keys": stored}
        indexers = [layer.attn.indexer for layer in llm.runner.model.layers if layer.attn.indexer is not None]
        assert {one.spread is not None for one in indexers} == {spread}
        assert len(llm.generate(prompts(160, (70,)), SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids) == 8


def test_other_dtypes_of_index_keys_are_refused(tmp_path):
    make("glm_moe_dsa", "shared", tmp_path)
    with pytest.raises(UsageError, match=r"index_key_dtype = 'int4'.*'auto', 'none', 'fp8', 'int8'"):
        LLM(tmp_path, **OPTIONS, index_key_dtype="int4")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"indexer_types": ["shared", "full"]}, "the first layer has no indexer"),
        ({"indexer_types": ["full"]}, "indexer_types is not a list of 2 names"),
        ({"indexer_types": None, "index_topk_pattern": "F"}, "index_topk_pattern is not a string of 2 letters"),
        ({"index_head_dim": 8}, "index_head_dim = 8 is less than the qk_rope_head_dim = 16"),
    ],
)
def test_configs_that_contradict_themselves(changes, words):
    entries = config_of("glm_moe_dsa", "each", num_hidden_layers=2).to_dict()
    config = {**entries, "architectures": ["GlmMoeDsaForCausalLM"], **changes}
    with pytest.raises(CheckpointError, match=words):
        build(Build(Config(config)))

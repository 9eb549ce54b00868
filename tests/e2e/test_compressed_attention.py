"""DeepSeek V4's layers with compressed entries in the engine: no answer changes, memory is the sum of its groups."""

from __future__ import annotations

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.engine.runner.estimate import estimate
from inferplane.types import CompressedCache
from tests.e2e.mixtures import check_same_answers
from tests.e2e.tiny_models import prompts
from tests.families.cases import make

OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
SETTINGS = {"temperature": 0, "ignore_eos": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "only_if_faster": False}
HEADS = {"index_n_heads": 24}  # of so few as 4, all scores may be 0 at once, and rounding decides between 0 and -0
BUDGET = 400_000
"""Bytes of a cache."""
LENGTHS = (140, 37, 64, 42, 139)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a layer of each kind; its entries stand for 4 and 64 tokens, so that a block has less than one."""
    made = tmp_path_factory.mktemp("compressed")
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 64}
    make("deepseek_v4", "all", made, compress_rates=rates, **HEADS)
    return made


def requests():
    """Prompts, some with a common beginning or that repeat themselves, and how many tokens each wants."""
    each = prompts(160, LENGTHS)
    each[3] = each[3][:7] * 6
    each[4] = each[0][:135] + each[4][:4]
    return each, [SamplingParams(max_tokens=n, **SETTINGS) for n in (24, 40, 3, 40, 20)]


@pytest.fixture(scope="module")
def alone(folder):
    """What each prompt gets alone, in one chunk, without a prefix cache."""
    with LLM(folder, enable_prefix_caching=False, **OPTIONS) as llm:
        return [llm.generate([p], q)[0].token_ids for p, q in zip(*requests())]


CASES = {
    "together": {},
    "batches of 2, chunks of 19": {"max_num_seqs": 2, "max_num_batched_tokens": 19},
    "steps ahead": {"async_scheduling": "on"},
    "few blocks": {"blocks": 7},
    "n-gram drafts": {"speculative_config": NGRAM},
    "n-gram drafts, few blocks, chunks of 19": {
        "speculative_config": NGRAM,
        "blocks": 7,
        "max_num_batched_tokens": 19,
    },
    "steps ahead, n-gram drafts, few blocks": {"async_scheduling": "on", "speculative_config": NGRAM, "blocks": 7},
}


@pytest.mark.parametrize("case", CASES)
def test_same_answer(case, folder, alone):
    options = dict(CASES[case])
    blocks = options.pop("blocks", None)
    if blocks:
        with LLM(folder, **OPTIONS) as llm:
            options["kv_cache_bytes"] = blocks * sum(
                len(shape.windows) * shape.block_bytes for shape in llm.runner.describe_pools()
            )
    with LLM(folder, **{**OPTIONS, **options}) as llm:
        windows = llm.engine.scheduler.tables.windows
        assert sorted((w or 0) for w in windows) == [0, 8, 20, 64] and len(llm.engine.pools.pools) == 4
        every, params = requests()
        stats = check_same_answers(llm, every, params, alone, preempts=bool(blocks))
        assert "speculative_config" not in options or stats["spec_decode_num_draft_tokens_total"] > 0


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8", "int8", "int4"])
def test_memory_is_the_sum_of_its_groups(kv_dtype, folder):
    """Rows of compressors are kept in the plan's dtype, all else in 8 bits at least."""
    options = {**OPTIONS, "dtype": "bfloat16", "kv_cache_dtype": kv_dtype, "kv_cache_bytes": BUDGET}
    with LLM(folder, **options) as llm:
        runner, cache = llm.runner, llm.runner.cache
        kinds = [(kv.request.kind, kv.request.rate) for kv in cache.layers]
        entries, far, heavy = ("shared_kv", 1), ("shared_kv", 4), ("shared_kv", 64)
        rows, index = ("compressor_rows", 1), [("index_rows", 1), ("index_keys", 4)]
        assert kinds == [entries, entries, rows, far, *index, entries, rows, heavy]
        assert {place.table for place in cache.by_layer[1:]} == {0}
        assert all(isinstance(place.cache, CompressedCache) for place in cache.by_layer[1:])
        dim = cache.layers[0].request.dim
        stored = {"auto": 2 * dim, "fp8": dim + 4, "int8": dim + 4, "int4": dim + 4}[kv_dtype]
        each = {r: runner.plan.layouts[r].bytes_per_block(r, torch.bfloat16) for r in runner.kv_requests()}
        tokens = runner.block_tokens
        want = {entries: tokens * stored, far: tokens // 4 * stored, heavy: stored}
        assert {(r.kind, r.rate): size for r, size in each.items() if r.kind == "shared_kv"} == want
        row_bytes = {r.kind: size for r, size in each.items() if r.kind.endswith("_rows") and r.window == 8}
        index_dim = next(r.dim for r in each if r.kind == "index_keys")
        assert row_bytes == {"compressor_rows": tokens * 8 * dim, "index_rows": tokens * 8 * index_dim}
        held = sum(sum(t.nbytes for t in kv.list_tensors()) for kv in cache.storages())
        pools = runner.describe_pools()
        assert held == sum(count * shape.block_bytes for count, shape in zip(cache.list_pools(), pools))
        spread = runner.model.layers[1].attn.indexer.spread
        assert (spread is not None) == (kv_dtype != "auto")
        assert "; 1 layers also keep index keys" in runner.explain_text()
        assert runner.describe_caches()["kv_tables"]["tables"][0] == {"window": None, "layers": 2, "pool": 0}
        assert cache.list_pools() == estimate(runner, None, 64).blocks(BUDGET) and held <= BUDGET
        got = llm.generate(prompts(160, (70, 3)), SamplingParams(max_tokens=8, **SETTINGS))
        assert [len(r.token_ids) for r in got] == [8, 8]


def test_entries_of_many_tokens_take_little_beside_the_others(folder):
    """In blocks of fewer tokens than an entry stands for, each block has one entry; with the others' it is within 1.1
    times of what the groups hold, in the published proportions: entries of 512, keys of 128, rates of 4 and 128."""
    with LLM(folder, **OPTIONS) as llm:
        tokens = llm.runner.block_tokens
    chosen, whole = 20, 23  # layers
    exact = chosen * (512 + 128) / 4 + whole * 512 / 128
    stored = chosen * (512 + 128) / 4 + whole * 512 / min(tokens, 128)
    assert exact <= stored <= 1.1 * exact


def test_blocks_are_copied_and_loaded_whole(folder):
    with LLM(folder, **OPTIONS) as llm:
        llm.generate(prompts(160, (100,)), SamplingParams(max_tokens=4, **SETTINGS))
        for kv in llm.runner.cache.layers:
            blocks, other = torch.tensor([0, 1]), torch.tensor([2, 3])
            stored = kv.export(blocks)
            kv.copy_blocks(blocks, other)
            assert all(torch.equal(a, b) for a, b in zip(kv.export(other), stored))
            kv.load(torch.tensor([3, 2]), stored)
            assert all(torch.equal(a, b.flip(0)) for a, b in zip(kv.export(other), stored))

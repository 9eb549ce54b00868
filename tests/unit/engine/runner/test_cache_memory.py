"""How long a sequence may be in a small cache, with a window and without."""

import pytest

from inferplane import LLM, SamplingParams
from inferplane.engine.runner.kv_cache import CacheMemory
from inferplane.errors import CapacityError, InferplaneWarning
from inferplane.kvcache import PoolShape
from inferplane.types import HOST
from tests.unit.support.small import LLAMA


@pytest.mark.parametrize(
    ("blocks", "window", "want"),
    [(10, None, 100), (6, None, 96), (1, None, 16), (6, 30, 100), (3, 30, 100), (2, 30, 32), (1, 500, 16)],
)
def test_what_the_cache_allows(blocks, window, want):
    room = CacheMemory((blocks,), 16, [PoolShape((window,), 1000)], 9999)
    assert room.max_sequence_tokens(100, explicit_length=False) == want
    if want == 100:
        assert room.max_sequence_tokens(100, explicit_length=True) == 100
    else:
        with pytest.raises(
            CapacityError, match=r"max_model_len = 100 needs \d+ KV blocks of 1000 bytes.*9999 bytes for"
        ):
            room.max_sequence_tokens(100, explicit_length=True)


def test_no_block_at_all():
    with pytest.raises(CapacityError, match="One KV block takes 1000 bytes; the cache may take 999"):
        CacheMemory((0,), 16, [PoolShape((None,), 1000)], 999).max_sequence_tokens(100, explicit_length=False)


def test_fewer_blocks_than_tables():
    with pytest.raises(CapacityError, match="has 3 block tables; the cache has 2 KV blocks") as caught:
        CacheMemory((2,), 16, [PoolShape((None, 30, 30), 1000)], 2999).max_sequence_tokens(100, explicit_length=False)
    assert caught.value.remedy == "raise kv_cache_bytes, for example to 13000: 100 tokens take so many bytes"
    assert (
        CacheMemory((13,), 16, [PoolShape((None, 30, 30), 1000)], 13000).max_sequence_tokens(100, explicit_length=True)
        == 100
    )


OPTIONS = {"device": HOST, "load_format": "dummy", "dtype": "float32", "max_num_seqs": 4}


def test_a_cache_that_makes_sequences_shorter_is_told_and_is_what_to_raise():
    with pytest.warns(
        InferplaneWarning, match=r"kv_cache_bytes = 130000 holds .* of the model's 256 tokens.*raise"
    ) as explicit_budget:
        llm = LLM(LLAMA, **OPTIONS, kv_cache_bytes=130_000)
    assert explicit_budget[0].filename == __file__  # the user's line, not one of ours
    with llm:
        most = llm.runner.max_model_len
        assert most < 256
        for ask in (
            lambda: llm.generate([1] * most, SamplingParams(max_tokens=1)),
            lambda: llm.logits([[1] * (most + 1)]),
        ):
            with pytest.raises(CapacityError, match=f"the cache's {most}") as caught:
                ask()
            assert caught.value.remedy.endswith("or raise kv_cache_bytes")


def test_a_length_that_was_asked_for_is_what_to_raise(recwarn):
    llm = LLM(LLAMA, **OPTIONS, kv_cache_bytes=1 << 20, max_model_len=32)
    with llm, pytest.raises(CapacityError, match="the model's 32 tokens") as caught:
        llm.generate([1] * 32, SamplingParams(max_tokens=1))
    assert caught.value.remedy.endswith("or raise max_model_len where the model allows it")
    assert not [w for w in recwarn if "kv_cache_bytes" in str(w.message)]

"""Tokenizers out of the metadata of GGUF files."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from inferplane.errors import CheckpointError
from inferplane.gguf.tokenizer import write_tokenizer
from inferplane.gguf.tokenizer_splits import SPLITS

TEXTS = (
    "tea 12 team\n\n  ea",
    "日本語 12345 naïve I'LL don't 🎉 x == y;\r\n\t",
    "<|im_start|>user\ntea<|im_end|>",
)


def _byte_level(**changes: Any) -> dict[str, Any]:
    """The metadata of a small vocabulary over bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = ["Ġt", "ea", "Ġtea", "tea"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *alphabet, *merged, "  "]
    entries = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": np.array([3] * 3 + [1] * (len(tokens) - 4) + [4], np.int32),
        "merges": ["Ġ t", "e a", "Ġt ea", "t ea"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (entries | changes).items() if value is not None}


def _pieces(**changes: Any) -> dict[str, Any]:
    """The metadata of a small vocabulary of SentencePiece."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{at:02X}>" for at in range(256)), "▁", "t", "e", "a", "▁t", "ea", "▁tea"]
    scores = [0.0] * 259 + [-9.0, -8.0, -7.0, -6.0, -1.0, -2.0, -3.0]
    types = [2, 3, 3, *[6] * 256, *[1] * 7]
    entries = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array(scores, np.float32),
        "token_type": np.array(types, np.int32),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (entries | changes).items() if value is not None}


def _written(metadata, folder) -> tuple[Tokenizer, dict[str, Any], dict[str, Any]]:
    write_tokenizer(metadata, folder)
    settings, generation = (
        json.loads((folder / name).read_text("utf-8")) for name in ("tokenizer_config.json", "generation_config.json")
    )
    return Tokenizer.from_file(str(folder / "tokenizer.json")), settings, generation


def test_byte_level(tmp_path):
    built, settings, generation = _written(_byte_level() | {"tokenizer.chat_template": "{{ 1 }}"}, tmp_path)
    assert built.encode("tea 12 tea  ea").tokens == ["tea", "Ġ", "1", "2", "Ġtea", "  ", "ea"]
    assert built.encode("a<|im_end|>").tokens == ["a", "<|im_end|>"]
    for text in TEXTS:
        assert built.decode(built.encode(text).ids, skip_special_tokens=False) == text
    assert settings["chat_template"] == "{{ 1 }}" and settings["eos_token"] == "<|im_end|>"
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0]}


def test_engine_reads_it_as_it_is_written(tmp_path):
    from inferplane.engine.request.tokenizer_loading import load_tokenizer

    built, *_ = _written(_byte_level(add_bos_token=True) | {"tokenizer.chat_template": "{{ 1 }}"}, tmp_path)
    loaded, _ = load_tokenizer(tmp_path, "")
    assert [list(loaded.encode(text)) for text in TEXTS] == [built.encode(text).ids for text in TEXTS]
    assert loaded.encode("a")[0] == 1 and loaded.chat_template == "{{ 1 }}"


def test_first_and_last_token(tmp_path):
    built, settings, _ = _written(_byte_level(add_bos_token=True, add_eos_token=True), tmp_path)
    assert built.encode("a").tokens == ["<|im_start|>", "a", "<|im_end|>"]
    assert settings["add_bos_token"] and settings["add_eos_token"]
    assert _written(_byte_level(add_bos_token=None), tmp_path)[0].encode("a").tokens == ["a"]
    built, *_ = _written(_byte_level(add_bos_token=None, pre="llama-bpe"), tmp_path)
    assert built.encode("a").tokens == ["<|im_start|>", "a"]


def test_pieces(tmp_path):
    built, settings, _ = _written(_pieces(), tmp_path)
    assert built.encode("tea tea").tokens == ["<s>", "▁tea", "▁tea"]
    assert built.encode("é").tokens == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert built.decode(built.encode("tea é🎉 tea").ids) == "tea é🎉 tea"
    assert settings["unk_token"] == "<unk>" and settings["bos_token"] == "<s>"
    built, *_ = _written(_pieces(add_space_prefix=False, add_bos_token=False), tmp_path)
    assert built.encode("tea tea").tokens == ["t", "ea", "▁tea"]
    assert built.decode(built.encode("  tea tea").ids) == "  tea tea"


def test_pieces_that_llama_merges_by_score_merge_by_id_in_gemma(tmp_path):
    scores = np.array([0.0] * 259 + [-9.0, -8.0, -7.0, -6.0, -1.0, -5.0, -3.0, -2.0], np.float32)
    tokens = [*_pieces()["tokenizer.ggml.tokens"], "te"]
    changed = {
        "tokens": tokens,
        "scores": scores,
        "token_type": None,
        "add_bos_token": False,
        "add_space_prefix": False,
    }
    assert _written(_pieces(**changed), tmp_path)[0].encode("tea").tokens == ["te", "a"]
    gemma = _pieces(**changed) | {"general.architecture": "gemma3"}
    assert _written(gemma, tmp_path)[0].encode("tea").tokens == ["t", "ea"]


def test_end_tokens(tmp_path):
    tokens = ["<|start|>", "<|end|>", "<|return|>", "<|call|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    types = np.array([3] * 4 + [1] * 257, np.int32)
    changed = {"tokens": tokens, "token_type": types, "merges": ["a b"], "bos_token_id": None, "eos_token_id": 2}
    # The end of a message, `<|end|>`, is not the text's.
    assert _written(_byte_level(**changed), tmp_path)[2] == {"eos_token_id": [2, 3]}
    stated = _byte_level(eot_token_id=0, eom_token_id=2**32 - 1)
    assert _written(stated, tmp_path)[2]["eos_token_id"] == [2, 0]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("qwen2", "I'LL take 1234", ["I", "'LL", " take", " ", "1", "2", "3", "4"]),
        ("qwen35", "हिन्दी 12", ["हिन्दी", " ", "1", "2"]),
        ("llama-bpe", "take 12345\n\n x", ["take", " ", "123", "45", "\n\n", " x"]),
        ("gpt-4o", "camelCase x/\n/y", ["camel", "Case", " x", "/\n/", "y"]),
        ("tekken", "camelCase 12", ["camel", "Case", " ", "1", "2"]),
        ("kimi-k2", "Hello世界abc 123", ["Hello", "世界", "abc", " ", "123"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("deepseek-v3", "x=1234 日本語 (a)", ["x", "=", "123", "4", " ", "日本語", " (", "a", ")"]),
        ("deepseek-llm", "Das Öl\n12 日本", ["Das", " Ö", "l", "\n", "12", " ", "日本"]),  # its symbols are `:-~`
        ("smollm", "take 12  x", ["take", " ", "1", "2", " ", " x"]),
        ("gpt-2", "take 12  x", ["take", " 12", " ", " x"]),
        ("bailingmoe", "a??\n\nb", ["a", "??\n\n", "b"]),
    ],
)
def test_splits(name, text, pieces):
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name].patterns]
    assert [piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_every_split_loses_nothing(name):
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[name].patterns]
    for text in TEXTS:
        assert "".join(piece for piece, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)) == text


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, "missing"),
        (_byte_level(model="rwkv"), "'rwkv'"),
        (_byte_level(model=7), "7"),
        (_byte_level(pre="nonesuch"), "'nonesuch'"),
        (_byte_level(pre=None), "does not state how it splits"),
        (_byte_level(tokens=None), "lacks tokenizer.ggml.tokens"),
        (_byte_level(tokens=[]), "for tokens"),
        (_byte_level(tokens=["a", 1]), "for tokens"),
        (_byte_level(tokens=["a", "b", "a"], token_type=None), "'a' twice"),
        (_byte_level(tokens=["a" * 2000], token_type=None), "2000 characters"),
        (_byte_level(token_type=np.zeros(3, np.int32)), "token_type"),
        (_byte_level(token_type=np.zeros(9999, np.float32)), "token_type"),
        (_byte_level(merges=None), "lacks tokenizer.ggml.merges"),
        (_byte_level(merges=["Ġ t", "x"]), "2 merges, 1 make no token"),
        (_byte_level(eos_token_id="2"), "eos_token_id"),
        (_byte_level(add_bos_token=1), "add_bos_token"),
        (_byte_level() | {"tokenizer.chat_template": 3}, "chat_template"),
        (_pieces(scores=None), "lacks tokenizer.ggml.scores"),
        (_pieces(scores=np.zeros(3, np.float32)), "scores"),
        (_pieces(tokens=["x" * 300], scores=np.zeros(1, np.float32), token_type=None), "300 characters"),
    ],
)
def test_refused(metadata, words, tmp_path):
    with pytest.raises(CheckpointError, match=words):
        write_tokenizer(metadata, tmp_path)
    assert not list(tmp_path.iterdir())

"""Configs, generation configs and tokenizers that cannot be meant: one clear error each, naming file and entry."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest

from inferplane import LLM
from inferplane.engine.request.text import Tokenizer, end_ids
from inferplane.engine.runner.model_files import DEMO_FOLDER
from inferplane.errors import InferplaneError, InferplaneWarning, UnsupportedModelError
from inferplane.models import Build, Config, build
from inferplane.quant import format_of
from tests.unit.support.hostile import MOST_BYTES, refused, within_bounds
from tests.unit.support.small import LLAMA, V3

QWEN3_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def write(folder, content, name="config.json"):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


FILES = {
    "empty": ("", "not valid JSON"),
    "cut off": (json.dumps(LLAMA)[:-1], "not valid JSON"),
    "a list": ("[]", "no JSON object"),
    "a number": ("3", "no JSON object"),
    "byte order mark": ("\ufeff" + json.dumps(LLAMA), "not valid JSON"),
    "bad UTF-8": (b'{"a": "\xff"}', "not UTF-8"),
    "deep lists": ("[" * 100_000, "not valid JSON"),
    "deep objects": ('{"a":' * 100_000, "not valid JSON"),
    "many empty lists": ('{"a":[' + "[]," * 300_000 + "[]", "not valid JSON"),
    "three megabytes": ("{" + " " * 3_000_000 + "}", "at most 1048576"),
    "a number of many digits": ('{"vocab_size": ' + "9" * 100_000 + "}", "not valid JSON"),
}
KINDS = {
    "pipe": os.mkfifo,
    "loop": lambda path: path.symlink_to(path.name),
    "folder": lambda path: path.mkdir(),
    "nowhere": lambda path: path.symlink_to("nothing-here"),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


def rope(kind, **settings):
    return {"rope_scaling": {"rope_type": kind, **settings}}


ENTRIES = {
    "no width": (LLAMA, {"hidden_size": 0}, "hidden_size is 0, not a positive integer"),
    "negative width": (LLAMA, {"hidden_size": -64}, "hidden_size is -64"),
    "width 1e12": (LLAMA, {"hidden_size": 10**12}, "hidden_size is 1000000000000, more than"),
    "layers 1e12": (LLAMA, {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, more than 4096"),
    "layers 1e5": (LLAMA, {"num_hidden_layers": 10**5}, "num_hidden_layers"),
    "heads 1e12": (LLAMA, {"num_attention_heads": 10**12}, "num_attention_heads"),
    "heads do not divide": (LLAMA, {"num_attention_heads": 5, "num_key_value_heads": 2}, "num_key_value_heads = 2"),
    "vocabulary 1e12": (LLAMA, {"vocab_size": 10**12}, "vocab_size"),
    "vocabulary a string": (LLAMA, {"vocab_size": "160"}, "vocab_size is '160'"),
    "vocabulary missing": (LLAMA, {"vocab_size": None}, "lacks 'vocab_size'"),
    "positions 1e12": (LLAMA, {"max_position_embeddings": 10**12}, "max_position_embeddings"),
    "layers a list": (LLAMA, {"num_hidden_layers": [2]}, "num_hidden_layers"),
    "layers true": (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers is True"),
    "experts 1e12": (V3, {"n_routed_experts": 10**12}, "n_routed_experts is 1000000000000, more than 65536"),
    "prediction layers 1e12": (V3, {"num_nextn_predict_layers": 10**12}, "num_nextn_predict_layers"),
    "dense layers negative": (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    "experts of Qwen 1e12": (QWEN3_MOE, {"num_experts": 10**12}, "num_experts"),
    "sparse step 0": (QWEN3_MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    "plain layers a number": (QWEN3_MOE, {"mlp_only_layers": 3}, "mlp_only_layers is 3"),
    "more experts a token than there are": (QWEN3_MOE, {"num_experts_per_tok": 9}, "exceeds num_experts = 8"),
    "window 0": ({**LLAMA, "architectures": ["MistralForCausalLM"]}, {"sliding_window": 0}, "sliding_window is 0"),
    "epsilon of 400 digits": (LLAMA, {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*not a number from 0"),
    "base of 400 digits": (LLAMA, {"rope_theta": 10**400}, "rope_theta"),
    "base that overflows": (
        LLAMA,
        {"rope_theta": 1e300},
        r"rope_theta = 1e\+300; it must be a number from 1e-06 to 1e",
    ),
    "linear stretch of nothing": (LLAMA, rope("linear", factor=5e-324), "factor = 5e-324"),
    "yarn turns too few": (LLAMA, rope("yarn", factor=4.0, beta_fast=5e-324), "beta_fast = 5e-324"),
    "yarn context too small": (
        LLAMA,
        rope("yarn", factor=4.0, original_max_position_embeddings=5e-324),
        "original_max_position_embeddings",
    ),
    "yarn temperature overflows": (LLAMA, rope("yarn", factor=4.0, attention_factor=1e308), "attention_factor"),
    "yarn weight overflows": (LLAMA, rope("yarn", factor=4.0, mscale_all_dim=1e308), "mscale_all_dim"),
    "tied by a string": (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', neither true nor false"),
    "bias a number": (LLAMA, {"attention_bias": 1}, "attention_bias is 1, neither"),
    "window by a string": (QWEN3_MOE, {"use_sliding_window": "x", "sliding_window": 8}, "use_sliding_window is 'x'"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_are_no_config(case, tmp_path):
    content, says = FILES[case]
    write(tmp_path, content)
    message = refused(lambda: Config.read(tmp_path))
    assert str(tmp_path / "config.json") in message and re.search(says, message), message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file(kind, name, tmp_path):
    if name != "config.json":
        shutil.copy(DEMO_FOLDER / "config.json", tmp_path)
        Tokenizer(DEMO_FOLDER)  # transformers is imported once, and not on this test's account
    KINDS[kind](tmp_path / name)
    call = Config.read if name == "config.json" else Tokenizer
    assert str(tmp_path / name) in refused(lambda: call(tmp_path))


@pytest.mark.parametrize("case", ENTRIES)
def test_entries_that_cannot_be_meant(case):
    config, changes, says = ENTRIES[case]
    assert re.search(says, refused(lambda: build(Build(Config({**config, **changes})))))


def test_a_stretch_without_end_is_the_most_that_is_tabulated():
    config = {**LLAMA, **rope("dynamic", factor=1e308)}
    assert Config(config).positions == 2**24


@pytest.mark.parametrize("settings", ["fp8", 5, True, False, [1], ""])
def test_quantization_settings_that_are_none(settings):
    assert "quantization_config is" in refused(lambda: format_of(settings, None))


@pytest.mark.parametrize("block", [5, "128", [128], {"a": 1}])
def test_blocks_that_no_format_has(block):
    with pytest.raises(UnsupportedModelError, match="blocks"):
        format_of({"quant_method": "fp8", "weight_block_size": block}, None)


def test_an_unknown_architecture_names_the_page_of_what_is_known(tmp_path):
    write(
        tmp_path, json.dumps({**LLAMA, "architectures": ["EvilForCausalLM"], "auto_map": {"AutoModel": "evil.Model"}})
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a checkpoint ran')")
    with within_bounds(), pytest.raises(UnsupportedModelError) as caught:
        LLM(tmp_path, device="cpu", load_format="dummy")
    known = ("'EvilForCausalLM'", "docs/models.md", "load a model of one of these", "adding-a-model.md")
    assert all(part in str(caught.value) for part in known)


ENDS = {
    "beyond the vocabulary": (160, r"holds 160.*0 to 159"),
    "negative": (-1, "holds -1"),
    "a string": ("2", "holds '2'"),
    "a fraction": (2.0, r"holds 2\.0"),
    "true": (True, "holds True"),
    "nested": ([2, [3]], r"holds \[3\]"),
    "huge": (10**12, "holds 1000000000000"),
    "an object": ({"a": 1}, "holds"),
}


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_ends_of_text_that_no_token_is(case, name, tmp_path):
    value, says = ENDS[case]
    write(tmp_path, json.dumps({**LLAMA, "vocab_size": 160}))
    write(tmp_path, json.dumps({**LLAMA, "vocab_size": 160, "eos_token_id": value}), name)
    with pytest.warns(InferplaneWarning) as told:
        assert end_ids(tmp_path) == ({2} if case == "nested" else set())
    message = str(told[0].message)
    assert str(tmp_path / name) in message and re.search(f"eos_token_id {says}", message), message
    write(tmp_path, json.dumps({**LLAMA, "vocab_size": 160, "eos_token_id": [3, 159]}), name)
    assert end_ids(tmp_path) == {3, 159}


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"eos_token_id": [-1, 5, "x", 400]}', "\x80"])
def test_a_damaged_generation_config_is_told(text, tmp_path):
    """The rest of the ids counts, and config.json's."""
    write(tmp_path, json.dumps({**LLAMA, "vocab_size": 160, "eos_token_id": 7}))
    write(tmp_path, text.encode("latin1"), "generation_config.json")
    with pytest.warns(InferplaneWarning, match=r"generation_config\.json"):
        assert end_ids(tmp_path) == ({5, 7} if "eos" in text else {7})


DEMO_TOKENIZER = json.loads((DEMO_FOLDER / "tokenizer.json").read_text())


def tokenizer(**changes):
    return json.dumps({**DEMO_TOKENIZER, "model": {**DEMO_TOKENIZER["model"], **changes}})


TOKENIZERS = {
    "empty": "",
    "cut off": json.dumps(DEMO_TOKENIZER)[:-2000],
    "a list": "[]",
    "no model": json.dumps({k: v for k, v in DEMO_TOKENIZER.items() if k != "model"}),
    "unknown model": tokenizer(type="Evil"),
    "no vocabulary": tokenizer(vocab={}),
    "ids below 0": tokenizer(vocab=dict.fromkeys(DEMO_TOKENIZER["model"]["vocab"], -1)),
    "merges of nothing": tokenizer(merges=[["nope", "nada"]]),
    "deep lists": "[" * 100_000,
    "deep objects": '{"a":' * 100_000,
    "bad UTF-8": b"\xff\xfe",
}


@pytest.mark.parametrize("case", [*TOKENIZERS, "own code", "own code in its config", "settings a list"])
def test_damaged_tokenizers(case, tmp_path):
    """transformers and tokenizers read these; what they raise becomes one error, and no code of a checkpoint is run."""
    Tokenizer(DEMO_FOLDER)  # imports transformers, not on this test's account
    shutil.copy(DEMO_FOLDER / "config.json", tmp_path)
    shutil.copy(DEMO_FOLDER / "tokenizer.json", tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a checkpoint ran')")
    own = {"auto_map": {"AutoTokenizer": ["evil.Tok", None]}, "tokenizer_class": "Evil"}
    if case == "own code":
        write(tmp_path, json.dumps(own), "tokenizer_config.json")
    elif case == "own code in its config":
        config = {**json.loads((DEMO_FOLDER / "config.json").read_text()), "model_type": "evil"}
        write(tmp_path, json.dumps({**config, "auto_map": {"AutoTokenizer": "evil.Tok", "AutoConfig": "evil.Conf"}}))
        (tmp_path / "tokenizer.json").unlink()
    elif case == "settings a list":
        write(tmp_path, "[]", "tokenizer_config.json")
    else:
        write(tmp_path, TOKENIZERS[case], "tokenizer.json")
    assert str(tmp_path) in refused(lambda: Tokenizer(tmp_path))


def test_a_huge_tokenizer_is_not_read(tmp_path):
    shutil.copy(DEMO_FOLDER / "config.json", tmp_path)
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(10 * MOST_BYTES)
    assert "more than 67108864 bytes" in refused(lambda: Tokenizer(tmp_path))


def test_pickles_are_never_opened(tmp_path):
    write(tmp_path, json.dumps(LLAMA))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/ran'\ntR.")
    with pytest.raises(InferplaneError, match=r"pytorch_model\.bin, which may run code"):
        LLM(tmp_path, device="cpu")

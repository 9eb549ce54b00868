"""Checkpoints: whole and in shards, damaged in every way, configs that do not fit, within memory."""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.load_memory import LLAMA_1B, measure
from inferplane import LLM
from inferplane.engine import InferplaneWarning
from inferplane.engine.runner.model_runner import Runner
from inferplane.errors import CapacityError, CheckpointError, DeviceError, UnsupportedModelError, UsageError
from inferplane.models import Config, SafetensorsFolder
from inferplane.models.rope import frequencies
from inferplane.types.placement import WHOLE
from tests.e2e.checkpoints import edit_config, logits
from tests.e2e.tiny_models import LLAMA3, YARN, llama_config, make


@pytest.fixture
def sharded(whole, tmp_path):
    """The same in three files with an index."""
    tensors = load_file(whole[0] / "model.safetensors")
    names = sorted(tensors)
    where = {}
    for i in range(3):
        part = {n: tensors[n] for n in names[i::3]}
        save_file(part, tmp_path / f"model-{i + 1:05}-of-00003.safetensors")
        where |= dict.fromkeys(part, f"model-{i + 1:05}-of-00003.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    shutil.copy(whole[0] / "config.json", tmp_path)
    return tmp_path


def spoil_header(path, change):
    """Rewrite the header of a safetensors file; the data stay."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = change(json.loads(raw[8 : 8 + length]))
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


# ------------------------------------------------------------------ files


def test_shards(whole, sharded):
    assert torch.equal(logits(sharded), whole[1])
    (sharded / "old.safetensors").write_bytes(b"an index says which files count")
    assert torch.equal(logits(str(sharded)), whole[1])
    (sharded / "old.safetensors").unlink()
    (sharded / "model.safetensors.index.json").unlink()  # the files say it, too
    assert torch.equal(logits(sharded), whole[1])


def test_saved_in_shards_by_transformers(tmp_path):
    model = make("deepseek", "q_lora", tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert torch.equal(logits(tmp_path / "many"), logits(tmp_path / "one"))


def test_shards_that_lack_something(sharded):
    index = sharded / "model.safetensors.index.json"
    second = sharded / "model-00002-of-00003.safetensors"
    good, tensors = index.read_text(), load_file(second)
    shutil.copy(second, sharded / "model.safetensors")
    with pytest.warns(InferplaneWarning, match=r"an index of other files; model\.safetensors is not used"):
        LLM(sharded, device="cpu").close()
    (sharded / "model.safetensors").unlink()
    stale = next(iter(tensors))
    save_file({stale: tensors[stale] + 1}, sharded / "model-00009.safetensors")
    where = json.loads(good)["weight_map"]
    index.write_text(
        json.dumps({"weight_map": {k: v for k, v in where.items() if k != stale} | {"x": "model-00009.safetensors"}})
    )
    with pytest.raises(CheckpointError, match=rf"{stale}.*model-00002-of-00003.* again in model-00009.*other values"):
        LLM(sharded, device="cpu")
    index.write_text(good)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"names 1 file.*model-00002-of-00003\.safetensors"):
        LLM(sharded, device="cpu")
    index.unlink()
    (sharded / "model-00009.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"lacks {len(tensors)} tensor"):
        LLM(sharded, device="cpu")


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": ["b"]}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": ".."}}',
        '{"weight_map": {"a": ""}}',
        '{"weight_map": {"a": "config.json"}}',
        "[" * 100000,
    ],
)
def test_index_that_is_none(sharded, index):
    (sharded / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        LLM(sharded, device="cpu")


def first(header, **changes):
    name = next(n for n in header if n != "__metadata__")
    header[name] |= changes
    return header


@pytest.mark.parametrize(
    "change",
    [
        lambda h: first(h, shape=[1 << 40, 1 << 40]),
        lambda h: first(h, shape=[-1, -64]),
        lambda h: first(h, shape=[1.5]),
        lambda h: first(h, shape="64"),
        lambda h: first(h, shape=None),
        lambda h: first(h, data_offsets=[0, 1 << 50]),
        lambda h: first(h, data_offsets=[-4, 0]),
        lambda h: first(h, data_offsets=[5]),
        lambda h: first(h, dtype="F31"),
        lambda h: first(h, dtype=["F32"]),
        lambda h: {"a": 3},
        lambda h: {"a": {}},
        lambda h: [],
        lambda h: "{",
        lambda h: "[" * 100000,
        lambda h: "\xff",
    ],
)
def test_headers_that_lie(copy, change):
    spoil_header(copy[0] / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(copy[0], device="cpu")


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1, -1000])
def test_truncated_files(copy, keep):
    path = copy[0] / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(copy[0], device="cpu")
    path.write_bytes(b"\xff" * 8 + raw[8:])
    with pytest.raises(CheckpointError, match="no safetensors file"):
        LLM(copy[0], device="cpu")


def test_a_file_that_shrinks_while_it_is_read(copy):
    source, out = SafetensorsFolder(copy[0]), torch.empty(64)
    path = copy[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends before its tensors do"):
        source.read_into("model.norm.weight", out, WHOLE)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("model.layers.1.mlp.up_proj.weight", lambda t: t[:-1], "other shapes"),
        ("model.layers.1.mlp.up_proj.weight", lambda t: t.T.contiguous(), "other shapes"),
        ("model.layers.1.self_attn.o_proj.weight", lambda t: t.reshape(-1), "other shapes"),
        ("model.layers.0.self_attn.q_proj.weight", lambda t: t[None], "other shapes"),
        ("model.norm.weight", lambda t: t[None], "other shapes"),
        ("model.norm.weight", lambda t: t.sum(), "other shapes"),
        ("lm_head.weight", lambda t: t[:, :0], "other shapes"),
        ("lm_head.weight", lambda t: t.to(torch.int8), "means nothing without scales: lm_head.weight int8"),
        ("model.layers.0.mlp.gate_proj.weight", lambda t: t.to(torch.float8_e4m3fn), "gate_proj.weight float8_e4m3fn"),
        ("model.layers.0.input_layernorm.weight", lambda t: t > 0, "input_layernorm.weight bool"),
        ("model.embed_tokens.weight", None, "lacks 1 tensor"),
    ],
)
def test_tensors_that_do_not_fit(copy, name, change, says):
    folder, tensors = copy
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"(?s){says}") as caught:
        LLM(folder, device="cpu")
    assert name in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers_warn(copy, value):
    """They are loaded: one broken expert of hundreds need not be met. Requests that meet them end with an error."""
    folder, tensors = copy
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.warns(InferplaneWarning, match=rf"1 weight\(s\) hold NaN or infinity: {re.escape(name)}\."):
        LLM(folder, device="cpu").close()
    tensors[name][3, 5] = 0
    save_file(tensors, folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        LLM(folder, device="cpu").close()


def test_an_index_that_does_not_add_up_warns(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    total = sum(t.numel() * t.element_size() for f in sharded.glob("*.safetensors") for t in load_file(f).values())
    path.write_text(json.dumps(index | {"metadata": {"total_size": total}}))
    logits(sharded)
    path.write_text(json.dumps(index | {"metadata": {"total_size": total - 4}}))
    with pytest.warns(InferplaneWarning, match=rf"{total - 4} bytes \(total_size\), its files hold {total}\."):
        LLM(sharded, device="cpu").close()


def test_experts_that_differ_in_size(tmp_path):
    """Their rows add up all the same."""
    make("deepseek", "q_lora", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    a, b = (f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in (0, 1))
    tensors[a], tensors[b] = tensors[a][:-8].clone(), torch.cat((tensors[b], tensors[a][-8:]))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"other shapes.*layers\.1\.mlp\.experts\.0"):
        LLM(tmp_path, device="cpu")


def test_pickles_are_refused_by_name(copy):
    folder, _ = copy
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which may run code"):
        LLM(folder, device="cpu")
    with pytest.raises(CheckpointError, match="dummy"):
        LLM({**llama_config().to_dict(), "architectures": ["LlamaForCausalLM"]}, device="cpu")
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        LLM(folder, device="cpu")


def frequencies_of(folder):
    config = Config.read(folder)
    return frequencies(config.rope, config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])[0]


STORED = {
    "as the config gives them": (lambda f: f, False),
    "in bfloat16": (lambda f: f.bfloat16(), False),
    "in float16": (lambda f: f.half(), False),
    "rounded once": (lambda f: f.half().float(), False),
    "of another base": (lambda f: f**1.05, True),
    "of scaled positions": (lambda f: f / 2, True),
    "of another size of heads": (lambda f: f[:-1], True),
    "ones": (torch.ones_like, True),
    "NaN": (lambda f: f * float("nan"), True),
}


@pytest.mark.parametrize("case", STORED)
def test_stored_rotary_frequencies_that_the_config_does_not_give_are_named(case, copy):
    folder, tensors = copy
    change, is_told = STORED[case]
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    save_file({**tensors, name: change(frequencies_of(folder)).contiguous()}, folder / "model.safetensors")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        LLM(folder, device="cpu").close()
    found = [str(w.message) for w in told if issubclass(w.category, InferplaneWarning)]
    assert [name in words and "other rotary frequencies" in words for words in found] == [True] * is_told


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_frequencies_of_scaled_positions_are_known(kind, copy):
    """Older exports stored those before scaling."""
    folder, tensors = copy
    scaling = {"yarn": YARN, "llama3": LLAMA3}.get(kind, {"rope_type": kind, "factor": 4.0})
    plain = frequencies_of(folder)
    edit_config(folder, rope_parameters=None, rope_scaling=scaling, rope_theta=Config.read(folder).rope["rope_theta"])
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    for stored in (frequencies_of(folder), plain):
        save_file({**tensors, name: stored}, folder / "model.safetensors")
        logits(folder)  # which takes warnings for errors


def test_unexpected_tensors_are_named(copy):
    folder, tensors = copy
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = frequencies_of(folder)
    save_file(tensors, folder / "model.safetensors")
    logits(folder)  # known, and no warning
    tensors |= {f"model.layers.{i}.mlp.gate_proj.weight_scale": torch.ones(1) for i in range(6)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.warns(InferplaneWarning, match=r"6 tensor.*model\.layers\.0\.mlp.gate_proj.weight_scale,.*and 1 more"):
        LLM(folder, device="cpu").close()


def test_a_tied_head_may_be_written_too(tmp_path):
    make("llama", "tied_llama3", tmp_path)
    want = logits(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    assert torch.equal(logits(tmp_path), want)
    with LLM(tmp_path, device="cpu") as llm:
        assert llm.runner.model.head.weight is llm.runner.model.embed.weight


# ------------------------------------------------------------------ configs


def test_configs_that_are_none(copy):
    folder, _ = copy
    for text, says in (("{", "not valid JSON"), ("[]", "no JSON object"), ("\x80", "not valid JSON")):
        (folder / "config.json").write_bytes(text.encode("latin1"))
        with pytest.raises(CheckpointError, match=says):
            LLM(folder, device="cpu")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        LLM(folder, device="cpu")
    with pytest.raises(UsageError, match="is no folder"):
        LLM(str(folder / "absent"), device="cpu")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"architectures": ..., "model_type": "x"}, UnsupportedModelError, "names no architecture"),
        ({"architectures": None, "model_type": ...}, UnsupportedModelError, "names no architecture"),
        (
            {"architectures": ["FooForCausalLM"], "model_type": "foo"},
            UnsupportedModelError,
            "architectures, among them",
        ),
        ({"architectures": ["FooForCausalLM"]}, None, "FooForCausalLM"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act = 'gelu'"),
        ({"mlp_bias": True}, CheckpointError, "lacks 6 tensor"),
        ({"hidden_size": ...}, CheckpointError, "lacks 'hidden_size'"),
        ({"num_hidden_layers": 0}, CheckpointError, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 3}, CheckpointError, "lacks 9 tensor"),
        ({"num_hidden_layers": 1}, None, "9 tensor"),
        ({"quantization_config": {"quant_method": "awq"}}, UnsupportedModelError, "'awq'"),
        (
            {"rope_parameters": {"rope_type": "mrope"}, "rope_scaling": {"rope_type": "mrope"}},
            UnsupportedModelError,
            "'mrope'",
        ),
    ],
)
def test_configs_that_do_not_fit(copy, changes, error, says):
    edit_config(copy[0], **changes)
    if error is None:
        with pytest.warns(InferplaneWarning, match=says):
            LLM(copy[0], device="cpu").close()
        return
    with pytest.raises(error, match=says):
        LLM(copy[0], device="cpu")


@pytest.mark.parametrize(
    ("family", "case", "rope"),
    [("llama", "tied_llama3", LLAMA3), ("llama", "linear", None), ("deepseek", "yarn", {**YARN, "mscale": 0.7})],
)
def test_both_spellings_of_a_config(family, case, rope, tmp_path):
    """transformers 4 writes rope_theta, rope_scaling with "type", torch_dtype; 5 writes rope_parameters, dtype."""
    make(family, case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = dict(config.get("rope_parameters") or {**config["rope_scaling"], "rope_theta": config["rope_theta"]})
    if rope is not None:
        assert rope.items() <= settings.items()
    want = logits(tmp_path)
    theta, kind = settings.pop("rope_theta"), settings.pop("rope_type")
    for scaling in ({**settings, "type": kind}, {**settings, "rope_type": kind}):
        edit_config(
            tmp_path, rope_parameters=..., rope_theta=theta, rope_scaling=scaling, dtype=..., torch_dtype="float32"
        )
        assert torch.equal(logits(tmp_path), want)
    edit_config(
        tmp_path, rope_scaling=..., rope_theta=..., rope_parameters={**settings, "rope_type": kind, "rope_theta": theta}
    )
    assert torch.equal(logits(tmp_path), want)


# ------------------------------------------------------------------ the rest


def test_progress_reaches_the_whole(whole):
    told = []
    LLM(whole[0], device="cpu", progress=lambda done, total: told.append((done, total))).close()
    done, totals = zip(*told)
    assert list(done) == sorted(done) and set(totals) == {done[-1]} and len(done) > 10


def test_what_cannot_be_opened(whole):
    with pytest.raises(DeviceError, match=r"nonsense.*cpu"):
        LLM(whole[0], device="nonsense")
    with pytest.raises(UsageError, match=r"max_model_len = 513.*1 to 512"):
        LLM(whole[0], device="cpu", max_model_len=513)
    with pytest.raises(CapacityError, match="max_model_len = 500 needs"):
        LLM(whole[0], device="cpu", max_model_len=500, kv_cache_bytes=2**16)
    with pytest.raises(CapacityError, match="One KV block"):
        LLM(whole[0], device="cpu", kv_cache_bytes=0)
    with pytest.raises(UsageError, match=r"kv_cache_dtype = 'int2'.*auto, fp8, int4, int8, k8v4"):
        LLM(whole[0], device="cpu", kv_dtype="int2")
    with pytest.raises(UsageError, match=r"kv_cache_dtype = 'q8_0'.*perhaps int8 was meant"):
        LLM(whole[0], device="cpu", kv_cache_dtype="q8_0")
    with LLM(whole[0], device="cpu", kv_cache_bytes=2**16) as llm:  # not asked for: what fits
        assert 0 < llm.runner.max_model_len < 512


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not run: VmHWM is Linux's")
@pytest.mark.parametrize("tied", [True, False])
def test_memory_of_loading(tied):
    """The benchmark's bar on a model an eighth of the size; a second copy of the weights would miss it."""
    small = {
        "vocab_size": 16384,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 4,
        "head_dim": 32,
    }
    found = measure({**LLAMA_1B, **small, "tie_word_embeddings": tied}, shard_bytes=40 * 2**20)
    assert found["weights_bytes"] > 140e6 and found["tokens"] == 2
    assert found["met"], found


@pytest.mark.parametrize("phase", ["bind_and_check", "load_weights", "build_caches"])
def test_what_does_not_fit_into_memory_is_said(phase, monkeypatch):
    """Never by a bare MemoryError, whatever the phase."""

    def fail(*arguments):
        raise MemoryError

    monkeypatch.setattr(Runner, phase, fail)
    with pytest.raises(CapacityError, match="demo cannot be loaded: this process cannot get more memory"):
        LLM("demo", device="cpu")

"""Weights in other forms: converted, in FP8 blocks, made up, divided among ranks."""

from __future__ import annotations

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM
from inferplane.binding.load import assemble
from inferplane.engine import InferplaneWarning
from inferplane.errors import CheckpointError, UsageError
from inferplane.models import Build, Config, SafetensorsFolder, build
from inferplane.quant import READERS, format_of
from inferplane.types import Placement, QTensor
from inferplane_cpu.native import native
from tests.e2e.checkpoints import FP8, PROMPT, edit_config, encode_fp8
from tests.e2e.tiny_models import config_of, deepseek_config, llama_config, random_model

# ------------------------------------------------------------------ dtypes


def packed(llm):
    """The model's weights as kernels read them, by site."""
    weights = {id(w): (site, w) for site, w in llm.runner.model.weights()}
    return {(*weights[i][0:1], name): t for (i, name), t in llm.runner.loaded.packed.items()}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_converted_on_load(stored, asked, copy):
    folder, tensors = copy
    tensors = {n: t.to(stored) for n, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    dtype = getattr(torch, asked)
    with LLM(folder, device="cpu", dtype=dtype) as llm:
        found = packed(llm)
        down = found["layers.1.mlp.down.weight", "canonical"]
        qkv = found["layers.0.attn.qkv.weight", "canonical"]
        assert down.dtype == qkv.dtype == llm.runner.dtype == dtype
        assert torch.equal(down, tensors["model.layers.1.mlp.down_proj.weight"].to(dtype))
        parts = [tensors[f"model.layers.0.self_attn.{x}_proj.weight"].to(dtype) for x in "qkv"]
        assert torch.equal(qkv, torch.cat(parts))
        assert llm.logits(PROMPT)[0].isfinite().all()


def test_dtype_auto_is_the_checkpoints(copy):
    for spelling in (
        {"dtype": "bfloat16"},
        {"dtype": ..., "torch_dtype": "float16"},
        {"dtype": ..., "torch_dtype": ...},
    ):
        edit_config(copy[0], **spelling)
        want = next((v for v in spelling.values() if v is not ...), "float32")
        with LLM(copy[0], device="cpu") as llm:
            assert llm.runner.dtype is getattr(torch, want)
    for wrong in ("int8", torch.int8, "float8_e4m3fn", torch.float64):
        with pytest.raises(UsageError, match="dtype"):
            LLM(copy[0], device="cpu", dtype=wrong)


@pytest.mark.skipif(native().library is None, reason=f"not run: {native().reason}")
def test_float16_without_kernels_is_warned_of(copy):
    """Where `auto` takes it, and the processor's native kernels compute in bfloat16 alone."""
    folder, tensors = copy
    save_file({n: t.half() for n, t in tensors.items()}, folder / "model.safetensors")
    edit_config(folder, dtype="float16")
    with pytest.warns(
        InferplaneWarning, match=r"is in float16, in which device 'cpu' runs .*linear.* by torch's own operat"
    ):
        LLM(folder, device="cpu").close()
    for dtype in ("float16", "bfloat16"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            LLM(folder, device="cpu", dtype=dtype).close()


# ------------------------------------------------------------------ FP8 blocks


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """A DeepSeek with sizes that do not fill their blocks: in FP8, and the same values in float32."""
    coded, plain = tmp_path_factory.mktemp("fp8"), tmp_path_factory.mktemp("plain")
    config = deepseek_config(
        hidden_size=200, intermediate_size=256, moe_intermediate_size=256, kv_lora_rank=150, v_head_dim=64
    )  # two ranks share the inputs of o and down, which must be whole blocks
    random_model(config).save_pretrained(plain)
    stored, values = encode_fp8(load_file(plain / "model.safetensors"))
    assert sum(n.endswith("_scale_inv") for n in stored) > 50
    save_file(values, plain / "model.safetensors")
    save_file(stored, coded / "model.safetensors")
    shutil.copy(plain / "config.json", coded)
    edit_config(coded, quantization_config=FP8)
    return coded, plain


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # compiled kernels take FP8 blocks as they are in bfloat16
def test_fp8_blocks_are_their_values(fp8, dtype):
    coded, plain = fp8
    with LLM(coded, device="cpu", dtype=dtype) as a, LLM(plain, device="cpu", dtype=dtype) as b:
        ours, want = packed(a), packed(b)
        expanded = [k for k in ours if k[1].startswith("plain")]
        assert len(ours) == len(want) and len(expanded) > 20
        for (site, name), t in ours.items():
            assert torch.equal(t, want[site, {"plain": "canonical"}.get(name, name)]), site
        assert torch.equal(a.logits(PROMPT)[0], b.logits(PROMPT)[0])
        found = {(e["op"], e["format"]): e["weights"] for e in a.explain()["dequantized"]}
        assert found["linear", "fp8_block"] > 10 and found["moe_experts", "fp8_block"] == 4
        assert "dequantized at load" in a.explain_text() and not b.explain()["dequantized"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, n: t.pop(f"{n}_scale_inv"), "float8_e4m3fn"),
        (lambda t, n: t.update({f"{n}_scale_inv": torch.ones(1, 1)}), "no FP8 weight in blocks"),
        (lambda t, n: t.update({f"{n}_scale_inv": t[f"{n}_scale_inv"].to(torch.int32)}), "no FP8 weight in blocks"),
        (lambda t, n: t.update({n: t[n].float()}), "no FP8 weight in blocks"),
        (lambda t, n: t.update({n: t[n].to(torch.float8_e5m2)}), "no FP8 weight in blocks"),
    ],
)
def test_fp8_blocks_that_lack_something(fp8, tmp_path, change, says):
    shutil.copy(fp8[0] / "config.json", tmp_path)
    tensors, name = load_file(fp8[0] / "model.safetensors"), "model.layers.0.mlp.down_proj.weight"
    change(tensors, name)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=says) as caught:
        LLM(tmp_path, device="cpu")
    assert name in str(caught.value)
    edit_config(tmp_path, quantization_config=...)
    save_file(load_file(fp8[0] / "model.safetensors"), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="quantization_config"):
        LLM(tmp_path, device="cpu")


# ------------------------------------------------------------------ FP8 with a scale a tensor or row


@pytest.mark.parametrize("each", ["tensor", "row"])
def test_fp8_of_one_scale_or_one_a_row(each, copy):
    """Parts of a fused weight have scales of their own; activations stay as they are where no kernel codes them, by the
    scale that calibration found or another.
    """
    folder, tensors = copy
    stored, values = {}, {}
    for name, t in tensors.items():
        stored[name] = values[name] = t
        if name.endswith("_proj.weight"):
            scale = (t.abs().amax() if each == "tensor" else t.abs().amax(1, keepdim=True)) / 448
            data = (t / scale).to(torch.float8_e4m3fn)
            stored |= {name: data, f"{name}_scale": scale, name.replace(".weight", ".input_scale"): torch.tensor(0.1)}
            values[name] = data.float() * scale
    save_file(values, folder / "model.safetensors")
    with LLM(folder, device="cpu", dtype="float32") as llm:
        want = llm.logits(PROMPT)[0]
    save_file(stored, folder / "model.safetensors")
    edit_config(folder, quantization_config={"quant_method": "fp8", "activation_scheme": "static"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM(folder, device="cpu", dtype="float32") as llm:
            assert torch.equal(llm.logits(PROMPT)[0], want)
            skipped = llm.explain()["activation_quant_skipped"]
            formats = {(w.format, str(w.activation_quant or "")) for w in llm.runner.plan.weights.values() if w.parts}
    assert formats == {("plain", ""), ("fp8_row", "fp8_static")}
    assert {(s["op"], s["activation_quant"]) for s in skipped} >= {("linear", "fp8")}
    name = "model.layers.1.mlp.down_proj.input_scale"
    for bad, what in ((None, "lacks"), (torch.tensor(float("nan")), "is nan"), (torch.ones(2), "not one positive")):
        broken = {k: t for k, t in stored.items() if k != name} | ({} if bad is None else {name: bad})
        save_file(broken, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"model\.layers\.1\.mlp\.down_proj.*{what}"):
            LLM(folder, device="cpu", dtype="float32")


# ------------------------------------------------------------------ dummy weights


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_dummy_weights(family, quantized, tmp_path):
    config = config_of(family, "odd")
    config.architectures = [{"llama": "LlamaForCausalLM", "deepseek": "DeepseekV3ForCausalLM"}[family]]
    config.num_nextn_predict_layers = 1  # transformers 4 has no such entry, and keeps it all the same
    entries = config.to_dict() | ({"quantization_config": FP8} if quantized else {})
    (tmp_path / "config.json").write_text(json.dumps(entries, default=str))
    for model in (entries, tmp_path) if quantized else (config, entries, tmp_path):
        with LLM(model, device="cpu", load_format="dummy", dtype="float32", mtp=family == "deepseek") as llm:
            assert llm.logits(PROMPT)[0].shape == (40, 101) and llm.logits(PROMPT)[0].isfinite().all()
            assert bool(llm.explain()["dequantized"]) == quantized
            got = {site: w.shape for site, w in llm.runner.model.weights()}
            assert got["layers.0.mlp.down.weight"] == (config.hidden_size, config.intermediate_size)
            again = llm.logits(PROMPT)[0]
        with LLM(model, device="cpu", load_format="dummy", dtype="float32", mtp=family == "deepseek") as llm:
            assert torch.equal(llm.logits(PROMPT)[0], again)  # the same each time
    with pytest.raises(UsageError, match="load_format"):
        LLM(entries, device="cpu", load_format="pt")


# ------------------------------------------------------------------ placement

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")


def halves(name, tensor, rank):
    if name.split(".")[-2] in ROWS:
        return tensor.chunk(2, 0)[rank]
    return tensor.chunk(2, 1)[rank] if name.split(".")[-2] in COLUMNS and tensor.ndim == 2 else tensor


@pytest.mark.parametrize("case", ["llama-gqa", "llama-attention_bias", "deepseek-q_lora", "deepseek-q_full", "fp8"])
def test_two_ranks_read_their_halves(case, fp8, tmp_path):
    folder, values = fp8
    if case != "fp8":
        folder = values = tmp_path
        extra = {"num_key_value_heads": 2} if case == "llama-attention_bias" else {}
        random_model(config_of(*case.split("-"), **extra)).save_pretrained(folder)
    tensors = load_file(values / "model.safetensors")
    source = SafetensorsFolder(folder)
    config = Config.read(folder)
    formats = format_of(config.get("quantization_config"), set(source.names()))
    seen: dict[str, set[int]] = {}
    for rank in (0, 1):
        model = build(Build(config, Placement(tp_rank=rank, tp_size=2), formats))
        for site, weight in model.weights():
            got = assemble(weight, source, torch.float32, READERS)
            got = got.dequantize() if isinstance(got, QTensor) else got
            assert tuple(got.shape) == weight.shape, site
            if weight.parts:
                want = torch.cat([halves(n, tensors[n], rank) for n in weight.parts])
                assert torch.equal(got.reshape(want.shape), want), site
            for name in weight.parts:
                seen.setdefault(name, set()).add(rank)
    alone = {n for n, ranks in seen.items() if ranks != {0, 1}}
    assert set(seen) == set(tensors)
    assert all(n.endswith("o_proj.bias") and seen[n] == {0} for n in alone)  # a sum over ranks may add it once only
    assert bool(alone) == (case == "llama-attention_bias")


@pytest.mark.parametrize(
    ("family", "changes", "dimension"),
    [
        (
            "llama",
            {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8, "hidden_size": 72},
            "num_attention_heads",
        ),
        (
            "llama",
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "hidden_size": 48},
            "num_key_value_heads",
        ),
        ("llama", {"vocab_size": 161}, "vocab_size"),
        ("llama", {"intermediate_size": 113}, "intermediate_size"),
        ("deepseek", {"num_heads": 3}, "num_attention_heads"),
        ("deepseek", {"moe_intermediate_size": 37}, "moe_intermediate_size"),
    ],
)
def test_sizes_that_two_ranks_cannot_share(family, changes, dimension):
    config = {"llama": llama_config, "deepseek": deepseek_config}[family](**changes)
    config.architectures = [{"llama": "LlamaForCausalLM", "deepseek": "DeepseekV3ForCausalLM"}[family]]
    build(Build(Config(config.to_dict())))
    with pytest.raises(UsageError, match=rf"{dimension} = \d+ cannot be shared equally by 2 ranks"):
        build(Build(Config(config.to_dict()), Placement(tp_rank=1, tp_size=2)))

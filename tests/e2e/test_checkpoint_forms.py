"""Checkpoints as other tools write them: transformers' own reading of the same folder is the measure."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inferplane import LLM
from inferplane.engine import InferplaneWarning
from inferplane.errors import CheckpointError, UnsupportedModelError, UsageError
from inferplane_cpu import native as cpu
from tests.e2e.checkpoints import edit_config
from tests.e2e.test_parity import FLOAT32, error
from tests.e2e.tiny_models import CASES, config_of, logits_of, make, prompts, random_model

Tensors = dict[str, torch.Tensor]
ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def check(folder: Path, model: Any, **options: Any) -> list[str]:
    """Compare logits with transformers' model; returns the warnings of loading."""
    many = prompts(model.config.vocab_size, (23, 70))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with LLM(folder, device="cpu", **{"dtype": "float32", **options}) as llm:
            for ids, got in zip(many, llm.logits(many)):
                assert error(got, logits_of(model, ids)) <= FLOAT32
    return [str(w.message) for w in told if issubclass(w.category, InferplaneWarning)]


def from_pretrained(folder: Path) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def rewrite(folder: Path, change: Any) -> None:
    """Write a folder's tensors anew, changed."""
    save_file({n: t.contiguous() for n, t in change(load_file(folder / ONE)).items()}, folder / ONE)


# ------------------------------------------------------------------ biases, rotary settings


@pytest.mark.parametrize(
    ("family", "case", "changes"),
    [
        ("llama", "gqa", {"mlp_bias": True}),
        ("llama", "attention_bias", {"mlp_bias": True, "attention_bias": True}),
        ("deepseek_v2", "greedy", {"mlp_bias": True}),
        ("deepseek_v2", "groups", {"attention_bias": True, "mlp_bias": True}),
        ("deepseek_v2", "greedy", {"attention_bias": True}),
        ("deepseek_v2", "greedy", {"norm_topk_prob": True}),
        ("deepseek_v2", "groups", {"norm_topk_prob": True}),
        ("deepseek", "q_lora", {"attention_bias": True}),
        ("deepseek", "q_full", {"attention_bias": True}),
        ("llama", "gqa", {"partial_rotary_factor": 0.5}),
        ("qwen3", "window", {"partial_rotary_factor": 0.25}),
        ("mistral", "window", {"partial_rotary_factor": 0.5}),
        ("deepseek", "q_lora", {"partial_rotary_factor": 0.5}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_settings_that_were_refused(family, case, changes, dtype, tmp_path):
    kind = getattr(torch, dtype)
    every = {"num_experts_per_tok": 8, "topk_group": 4} if family.startswith("deepseek") and dtype == "bfloat16" else {}
    model = random_model(config_of(family, case, **changes, **every)).to(kind)  # then no rounding chooses other experts
    model.save_pretrained(tmp_path)
    model = model.float()
    ids = prompts(model.config.vocab_size, (60,))
    with LLM(tmp_path, device="cpu") as llm:
        assert llm.runner.dtype is kind
        for chunk_tokens in (1000, 7):
            got = llm.logits(ids, chunk_tokens=chunk_tokens)[0]
            bound = FLOAT32 if dtype == "float32" else 0.1  # a bias that is dropped makes 0.13 and more
            assert error(got, logits_of(model, ids[0])) <= bound


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "deepseek_v2", "deepseek"])
@pytest.mark.parametrize("more", [{}, {"factor": 3.0}, {"attention_factor": 1.3}])
def test_longrope(family, more, tmp_path):
    """Within the original context with a limit on the length, and beyond it without one."""
    config = config_of(family, next(iter(CASES[family])))
    dim = getattr(config, "head_dim", None) or 16
    rope = {"short_factor": [1 + 0.1 * i for i in range(dim // 2)], "long_factor": [2.0 + i for i in range(dim // 2)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 40, **rope, **more}
    config = config_of(family, next(iter(CASES[family])), rope=rope, max_position_embeddings=160)
    model = random_model(config)
    model.save_pretrained(tmp_path)
    for length, limit in ((40, 40), (41, None), (150, None), (23, 40)):
        ids = prompts(config.vocab_size, (length,))
        with LLM(tmp_path, device="cpu", max_model_len=limit) as llm:
            for chunk_tokens in (1000, 9):
                assert error(llm.logits(ids, chunk_tokens=chunk_tokens)[0], logits_of(model, ids[0])) <= FLOAT32


# ------------------------------------------------------------------ heads and ties


@pytest.mark.parametrize(("family", "case"), [("llama", "tied_llama3"), ("qwen2", "tied"), ("deepseek", "one_group")])
@pytest.mark.parametrize("form", ["another", "the same", "as another", "one row", "only the head"])
def test_a_head_beside_a_tied_embedding(family, case, form, tmp_path):
    make(family, case, tmp_path)
    embedding = load_file(tmp_path / ONE)["model.embed_tokens.weight"]
    head = torch.randn_like(embedding) if form in ("another", "as another") else embedding.clone()
    if form == "one row":
        head[7] += 1
    rewrite(tmp_path, lambda tensors: tensors | {"lm_head.weight": head})
    if form == "only the head":
        rewrite(tmp_path, lambda t: {n: x for n, x in t.items() if n != "model.embed_tokens.weight"})
    told = check(tmp_path, from_pretrained(tmp_path))
    assert any("another lm_head.weight" in what for what in told) is (form in ("another", "as another", "one row"))


@pytest.mark.parametrize(
    ("family", "case"),
    [("llama", "gqa"), ("qwen3", "yarn"), ("mistral", "window"), ("mixtral", "plain"), ("deepseek", "q_lora")],
)
@pytest.mark.parametrize("form", ["bare", "wrapped", "without a head"])
def test_names_without_model(family, case, form, tmp_path):
    """Names of the base model, of a wrapper, and of a model that was saved for embeddings."""
    model = make(family, case, tmp_path)
    prefix = {"bare": "", "wrapped": "_orig_mod.model.", "without a head": ""}[form]

    def rename(tensors: Tensors) -> Tensors:
        out = {n.replace("model.", prefix, 1) if n.startswith("model.") else n: t for n, t in tensors.items()}
        if form == "wrapped":
            out = {n if n.startswith(prefix) else f"_orig_mod.{n}": t for n, t in out.items()}
        return {n: t for n, t in out.items() if form != "without a head" or not n.startswith("lm_head")}

    rewrite(tmp_path, rename)
    if form != "without a head":
        assert check(tmp_path, model) == []
        return
    base = type(model.model).__name__
    edit_config(tmp_path, architectures=[base])
    ids = prompts(model.config.vocab_size, (30,))
    tied = model.config.tie_word_embeddings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if not tied else "error", InferplaneWarning)
        with LLM(tmp_path, device="cpu") as llm, torch.no_grad():
            want = model.model(torch.tensor(ids)).last_hidden_state[0, -1]
            got = torch.tensor(llm.embed(ids, "last", normalize=False)[0])
            assert (got - want).abs().max() <= FLOAT32 * want.abs().max()
    if not tied:
        with pytest.warns(InferplaneWarning, match="has no output head"):
            LLM(tmp_path, device="cpu").close()
        edit_config(tmp_path, architectures=[base.replace("Model", "ForCausalLM")])
        with pytest.raises(CheckpointError, match=r"lacks 1 tensor.*lm_head\.weight"):
            LLM(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("family", "case"),
    [("mixtral", "plain"), ("qwen3_moe", "plain"), ("deepseek_v2", "greedy"), ("deepseek", "q_lora")],
)
@pytest.mark.parametrize("form", ["fused", "fused, without model"])
def test_experts_as_transformers_keeps_them(family, case, form, tmp_path):
    model = make(family, case, tmp_path)
    state = {n: t.contiguous().clone() for n, t in model.state_dict().items()}
    assert any(n.endswith("experts.gate_up_proj") for n in state)
    if form != "fused":
        state = {n.removeprefix("model."): t for n, t in state.items()}
    save_file(state, tmp_path / ONE)
    assert check(tmp_path, model) == []


# ------------------------------------------------------------------ files


def split(folder: Path, count: int = 3) -> dict[str, str]:
    """Divide a folder's tensors over files with an index; returns the file of each tensor."""
    tensors = load_file(folder / ONE)
    (folder / ONE).unlink()
    where = {n: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, n in enumerate(sorted(tensors))}
    for file in set(where.values()):
        save_file({n: tensors[n] for n in tensors if where[n] == file}, folder / file)
    index(folder, where)
    return where


def index(folder: Path, where: dict[str, str], name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def beside(folder: Path) -> None:
    """A whole model beside an index of files with other values."""
    tensors = load_file(folder / ONE)
    split(folder)
    for file in folder.glob("model-*.safetensors"):
        save_file({n: t + 1 for n, t in load_file(file).items()}, file)
    save_file(tensors, folder / ONE)


def variant(folder: Path) -> None:
    (folder / ONE).rename(folder / "model.fp16.safetensors")


def beside_a_variant(folder: Path) -> None:
    save_file({n: t + 1 for n, t in load_file(folder / ONE).items()}, folder / "model.fp16.safetensors")


def variant_shards(folder: Path) -> None:
    where = split(folder)
    (folder / INDEX).unlink()
    index(folder, where, "model.safetensors.index.fp16.json")


def twice_with_index(folder: Path) -> None:
    """The index says which of two values counts."""
    where = split(folder)
    name, file = next(iter(where.items()))
    other = folder / next(f for f in sorted(where.values()) if f != file)
    held = load_file(other)
    save_file({**held, name: torch.zeros_like(load_file(folder / file)[name])}, other)


def twice_alike(folder: Path) -> None:
    tensors = load_file(folder / ONE)
    where = split(folder)
    (folder / INDEX).unlink()
    file = folder / next(iter(where.values()))
    save_file({**load_file(file), **dict(list(tensors.items())[:5])}, file)


def names_nothing(folder: Path) -> None:
    where = split(folder)
    index(folder, {**where, "model.layers.7.mlp.up_proj.weight": next(iter(where.values()))})


def names_wrongly(folder: Path) -> None:
    where = split(folder)
    files = list(where.values())
    index(folder, dict(zip(where, files[1:] + files[:1])))


FILES = {
    beside: "the index is not used",
    variant: "",
    beside_a_variant: "",
    variant_shards: "",
    twice_with_index: "",
    twice_alike: "",
    names_nothing: r"names 1 tensor\(s\) that its files do not hold: model\.layers\.7",
    names_wrongly: "in other files",
}


@pytest.mark.parametrize("change", FILES, ids=lambda f: f.__name__)
def test_files(change, tmp_path):
    import re

    model = make("llama", "gqa", tmp_path)
    change(tmp_path)
    told = check(tmp_path, model)
    assert len(told) == bool(FILES[change]) and all(re.search(FILES[change], what) for what in told), told


def test_what_two_files_say_differently_is_refused(tmp_path):
    make("llama", "gqa", tmp_path)
    tensors = load_file(tmp_path / ONE)
    variant(tmp_path)
    save_file({n: t + 1 for n, t in tensors.items()}, tmp_path / "model.fp32.safetensors")
    with pytest.raises(CheckpointError, match=r"again in model\.fp32\.safetensors, with other values"):
        LLM(tmp_path, device="cpu")


def test_what_the_model_needs_and_no_file_holds_is_refused(tmp_path):
    make("llama", "gqa", tmp_path)
    rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if "layers.1.mlp" not in n})
    index(tmp_path, {**dict.fromkeys(load_file(tmp_path / ONE), ONE), "model.layers.1.mlp.up_proj.weight": ONE})
    with pytest.raises(CheckpointError, match="lacks 3 tensor"):
        LLM(tmp_path, device="cpu")


# ------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("stated", [..., None, "auto"])
def test_the_files_dtype_counts_where_the_config_has_none(stored, stated, tmp_path):
    make("llama", "gqa", tmp_path)
    rewrite(tmp_path, lambda tensors: {n: t.to(getattr(torch, stored)) for n, t in tensors.items()})
    edit_config(tmp_path, dtype=stated, torch_dtype=stated)
    want = torch.float32 if stored == "float64" else getattr(torch, stored)
    for options in ({}, {"load_format": "dummy"}):
        found, told = dtype_of(tmp_path, **options)
        assert found is want
        assert [("float64" in words and "computed in float32" in words) for words in told] == [True] * (
            stored == "float64"
        )


def dtype_of(folder: Path, **options: Any) -> tuple[torch.dtype, list[str]]:
    """What a folder is computed in, and the warnings of loading, but that native kernels do not compute in float16."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with LLM(folder, device="cpu", **options) as llm:
            found = llm.runner.dtype
    words = [str(w.message) for w in told if issubclass(w.category, InferplaneWarning)]
    slow = [w for w in words if "by torch's own operators" in w]
    assert len(slow) == (found is torch.float16 and cpu.native().library is not None)
    return found, [w for w in words if w not in slow]


MIXTURES = {
    "norms wider": lambda name: torch.float32 if "norm" in name else torch.bfloat16,
    "norms narrower": lambda name: torch.bfloat16 if "norm" in name else torch.float32,
    "head wider": lambda name: torch.float32 if "lm_head" in name else torch.bfloat16,
    "head and embedding wider": lambda name: torch.float32 if name[:8] in ("lm_head.", "model.em") else torch.float16,
    "head in float16": lambda name: torch.float16 if "lm_head" in name else torch.bfloat16,
    "all alike": lambda name: torch.float16,
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("case", MIXTURES)
def test_of_several_dtypes_that_counts_which_transformers_takes(case, split, tmp_path):
    """The first tensor's, and both are named if most bytes have another one."""
    import transformers

    make("llama", "gqa", tmp_path)
    tensors = {n: t.to(MIXTURES[case](n)).contiguous() for n, t in load_file(tmp_path / ONE).items()}
    (tmp_path / ONE).unlink()
    if split:
        names = sorted(tensors)
        where = {name: f"model-{1 + (k < 9)}.safetensors" for k, name in enumerate(names)}
        for file in set(where.values()):
            save_file({n: tensors[n] for n in names if where[n] == file}, tmp_path / file, metadata={"format": "pt"})
        (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    else:
        save_file(tensors, tmp_path / ONE, metadata={"format": "pt"})
    edit_config(tmp_path, dtype=..., torch_dtype=...)
    want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype
    found, told = dtype_of(tmp_path)
    assert found is want
    kinds = {t.dtype for t in tensors.values()}
    main = max(kinds, key=lambda kind: sum(t.nbytes for t in tensors.values() if t.dtype is kind))
    assert len(told) == (found is not main)
    assert all(str(kind).removeprefix("torch.") in words for words in told for kind in (found, main))
    assert dtype_of(tmp_path, dtype="float32") == (torch.float32, [])


@pytest.mark.parametrize(
    ("spelling", "want"),
    [
        ("half", "float16"),
        ("bf16", "bfloat16"),
        ("fp16", "float16"),
        ("float", "float32"),
        ("fp32", "float32"),
        ("torch.half", "float16"),
        ("float64", "float32"),
        ("double", "float32"),
        ("torch.bfloat16", "bfloat16"),
    ],
)
def test_spellings_of_dtypes(spelling, want, tmp_path):
    make("llama", "gqa", tmp_path)
    for key in ("dtype", "torch_dtype"):
        edit_config(tmp_path, **{"dtype": ..., "torch_dtype": ..., key: spelling})
        found, told = dtype_of(tmp_path)
        assert found is getattr(torch, want)
        wider = spelling in ("float64", "double")
        assert len(told) == wider and all(f"{spelling}, which is not computed in" in words for words in told)
    if spelling not in ("float64", "double"):
        with LLM(tmp_path, device="cpu", dtype=spelling) as llm:
            assert llm.runner.dtype is getattr(torch, want)


# ------------------------------------------------------------------ what is no such folder


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.safetensors", "but a file.*pass its folder"),
        ("meta-llama/Llama-3.1-8B", "not whole in the cache; downloads are off.*inferplane pull meta-llama/Llama-3.1"),
        ("hf://a/b:Q4_K_M", "not whole in the cache; downloads are off.*inferplane pull hf://a/b:Q4_K_M"),
        ("qwen3:06b", "is no folder.*perhaps qwen3:0.6b (or .*)?was meant.*list --names"),
        ("/no/such/folder", "is no folder.*check the name, or pass the folder"),
        ("hf:a", "'hf:a' is no name of a model"),
        ("ollama://x", "an address of which nothing is downloaded.*the GGUF file that ollama keeps"),
    ],
)
def test_models_that_are_no_folder(name, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "/" not in name and ":" not in name:
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=says):
        LLM(name, device="cpu")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("adapter_config.json", "a LoRA adapter.*merge_and_unload"),
        ("model-q4.gguf", "damaged header"),
        ("params.json", "params.json of Mistral"),
        ("model_index.json", "pipeline"),
        ("other", r"no config\.json\..*Hugging Face layout"),
    ],
)
def test_folders_that_are_something_else(file, says, tmp_path):
    (tmp_path / file).write_text("{}")
    with pytest.raises(CheckpointError, match=says):
        LLM(tmp_path, device="cpu")


@pytest.mark.parametrize("kind", ["F4", "F6_E2M3", "F6_E3M2", "F8_E5M2FNUZ"])
def test_dtypes_that_are_not_read_are_named(kind, tmp_path):
    make("llama", "gqa", tmp_path)
    header = {"x": {"dtype": kind, "shape": [8], "data_offsets": [0, 8]}}
    text = json.dumps(header).encode()
    (tmp_path / ONE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=f"stored as {kind}"):
        LLM(tmp_path, device="cpu")


# ------------------------------------------------------------------ Mistral's own layout


NATIVE = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.norm.": "norm.",
    "lm_head.": "output.",
    "model.layers.": "layers.",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "block_sparse_moe": "feed_forward",
    **{f"self_attn.{x}_proj": f"attention.w{x}" for x in "qkvo"},
}


def native(folder: Path, config: Any) -> None:
    """Rewrite a folder as Mistral publishes models: pairs that are rotated together lie side by side."""
    dim, out = config.head_dim, {}
    for name, tensor in load_file(folder / ONE).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = tensor.unflatten(0, (-1, 2, dim // 2)).transpose(1, 2).reshape(tensor.shape).contiguous()
        for ours, theirs in NATIVE.items():
            name = name.replace(ours, theirs)
        out[name] = tensor
    save_file(out, folder / "consolidated.safetensors")
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "head_dim": dim,
        "hidden_dim": config.intermediate_size,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_parameters["rope_theta"],
        "sliding_window": config.sliding_window,
    }
    if hasattr(config, "num_local_experts"):
        params["moe"] = {"num_experts": config.num_local_experts, "num_experts_per_tok": config.num_experts_per_tok}
    (folder / "params.json").write_text(json.dumps(params))
    for file in (ONE, "config.json", "generation_config.json"):
        (folder / file).unlink()


@pytest.mark.parametrize(("family", "case"), [("mistral", "window"), ("mistral", "narrow"), ("mixtral", "plain")])
def test_mistrals_own_layout(family, case, tmp_path):
    model = make(family, case, tmp_path)
    native(tmp_path, model.config)
    assert check(tmp_path, model) == []
    (tmp_path / "consolidated.safetensors").rename(tmp_path / "consolidated-00001.safetensors")
    assert check(tmp_path, model) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vision_encoder": {"dim": 1}}, "has vision_encoder"),
        ({"yarn": {"factor": 4}}, "has yarn"),
        ({"quantization": {"qformat_weight": "fp8"}}, "has quantization"),
        ({"moe": {"num_experts": 4, "shared": 1}}, "has moe.shared"),
        ({"rope_theta": None}, "lacks rope_theta"),
    ],
)
def test_what_is_not_read_from_mistrals_own_layout(changes, says, tmp_path):
    model = make("mistral", "window", tmp_path)
    native(tmp_path, model.config)
    params = json.loads((tmp_path / "params.json").read_text())
    (tmp_path / "params.json").write_text(json.dumps({**params, **changes}))
    with pytest.raises(UnsupportedModelError, match=f"{says}.*Hugging Face layout"):
        LLM(tmp_path, device="cpu")

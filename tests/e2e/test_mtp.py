"""Multi-token prediction: recognised in checkpoints, and equal to a float32 script written from its formula."""

from __future__ import annotations

import json
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from inferplane import LLM, SamplingParams
from inferplane.binding import view_of
from inferplane.engine import InferplaneWarning
from inferplane.errors import CheckpointError, UsageError
from inferplane.types.batch import Query, make_batch
from tests.e2e.tiny_models import YARN, deepseek_config, llama_config, prompts, random_model

MODULES = 2


def write(folder, **changes):
    """A random checkpoint with MTP modules, named as published ones are; returns its config and tensors."""
    model = random_model(deepseek_config(**changes), seed=4)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": MODULES}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    last, width = config["num_hidden_layers"] - 1, config["hidden_size"]
    draw = torch.Generator().manual_seed(6)
    for k in range(1, MODULES + 1):
        new = f"model.layers.{last + k}."
        for name in [n for n in tensors if n.startswith(f"model.layers.{last}.")]:
            noise = torch.randn(tensors[name].shape, generator=draw)
            scaled = 1 + 0.3 * noise if "norm" in name else noise / math.sqrt(noise.shape[-1])
            tensors[new + name.removeprefix(f"model.layers.{last}.")] = scaled
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{new}{name}.weight"] = 1 + 0.3 * torch.randn(width, generator=draw)
        tensors[f"{new}eh_proj.weight"] = torch.randn(width, 2 * width, generator=draw) / math.sqrt(2 * width)
        tensors[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        tensors[f"{new}shared_head.head.weight"] = head.clone()
    save_file(tensors, folder / "model.safetensors")
    return config, tensors


# ------------------------------------------------------------------ the oracle: DeepSeek-V3 report, section 2


def norm(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotate(x, config):
    """Pairs (2i, 2i+1) of `[..., tokens, dim]` turned by position times frequency."""
    dim, rope = x.shape[-1], settings(config)
    frequency = rope["rope_theta"] ** -(torch.arange(0, dim, 2).double() / dim)
    size = 1.0
    if rope.get("rope_type") == "yarn":
        base = math.log(rope["rope_theta"])
        place = [
            dim * math.log(rope["original_max_position_embeddings"] / (t * 2 * math.pi)) / (2 * base)
            for t in (rope["beta_fast"], rope["beta_slow"])
        ]
        low, high = max(math.floor(place[0]), 0), min(math.ceil(place[1]), dim - 1)
        kept = 1 - ((torch.arange(dim // 2).double() - low) / (high - low)).clamp(0, 1)
        frequency = frequency / rope["factor"] * (1 - kept) + frequency * kept
        size = temperature(rope, "mscale") / temperature(rope, "mscale_all_dim")
    angle = torch.arange(x.shape[-2]).double()[:, None] * frequency
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        angle * 0 + size, angle
    )
    return torch.view_as_real(turned).flatten(-2).float()


def settings(config):
    """From what transformers 5 writes, or 4."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 1e4), **found}


def temperature(rope, key):
    return 0.1 * rope[key] * math.log(rope["factor"]) + 1


def attention(x, w, c):
    heads, nope = c["num_attention_heads"], c["qk_nope_head_dim"]
    if c["q_lora_rank"]:
        q = norm(x @ w["q_a_proj"].T, w["q_a_layernorm"], 1e-6) @ w["q_b_proj"].T
    else:
        q = x @ w["q_proj"].T
    q = q.unflatten(-1, (heads, -1)).transpose(0, 1)
    c_kv, k_rope = (x @ w["kv_a_proj_with_mqa"].T).split((c["kv_lora_rank"], c["qk_rope_head_dim"]), -1)
    kv = (norm(c_kv, w["kv_a_layernorm"], 1e-6) @ w["kv_b_proj"].T).unflatten(-1, (heads, -1)).transpose(0, 1)
    scale = q.shape[-1] ** -0.5
    if (rope := settings(c)).get("rope_type") == "yarn":
        scale *= temperature(rope, "mscale_all_dim") ** 2
    scores = q[..., :nope] @ kv[..., :nope].mT + rotate(q[..., nope:], c) @ rotate(k_rope, c).T
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    p = (scores * scale).masked_fill(~seen, -math.inf).softmax(-1)
    return (p @ kv[..., nope:]).transpose(0, 1).flatten(1) @ w["o_proj"].T


def mlp(x, w, name):
    return (F.silu(x @ w[f"{name}gate_proj"].T) * (x @ w[f"{name}up_proj"].T)) @ w[f"{name}down_proj"].T


def experts(x, w, c):
    out = torch.zeros_like(x)
    for t, row in enumerate(x):
        score = torch.sigmoid(w["gate"] @ row)
        choice = score + w["gate.e_score_correction_bias"]
        groups = choice.view(c["n_group"], -1)
        best = groups.sort(-1, descending=True)[0][:, :2].sum(-1).argsort(descending=True)[: c["topk_group"]].tolist()
        size = groups.shape[1]
        allowed = [e for g in best for e in range(g * size, (g + 1) * size)]
        chosen = sorted(allowed, key=lambda e: -float(choice[e]))[: c["num_experts_per_tok"]]
        total = sum(score[e] for e in chosen) if c["norm_topk_prob"] else 1
        for e in chosen:
            out[t] += mlp(row, w, f"experts.{e}.") * score[e] / total * c["routed_scaling_factor"]
    return out + mlp(x, w, "shared_experts.")


def oracle(tensors, c, k, hidden, ids):
    """Logits and hidden states of module k for hidden states h_i and tokens t_{i+1}."""

    def part(inner):
        start = f"model.layers.{c['num_hidden_layers'] + k}.{inner}"
        found = {n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)}
        return {n.removesuffix(".weight"): t for n, t in found.items()}

    w, eps = part(""), c["rms_norm_eps"]
    e = tensors["model.embed_tokens.weight"][torch.tensor(ids)]
    x = torch.cat((norm(e, w["enorm"], eps), norm(hidden, w["hnorm"], eps)), -1) @ w["eh_proj"].T
    x = x + attention(norm(x, w["input_layernorm"], eps), part("self_attn."), c)
    x = x + experts(norm(x, w["post_attention_layernorm"], eps), part("mlp."), c)
    h = norm(x, w["shared_head.norm"], eps)
    return h @ w["shared_head.head"].T, h


# ------------------------------------------------------------------ tests


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"q_lora_rank": None, "n_shared_experts": 2, "tie_word_embeddings": True},
        {"rope": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0}, "rms_norm_eps": 1e-3},
    ],
    ids=["q_lora", "q_full_tied", "yarn"],
)
def test_against_the_formula(changes, tmp_path):
    config, tensors = write(tmp_path, **changes)
    with LLM(tmp_path, device="cpu", dtype="float32", mtp=True) as llm:
        cache, first = llm.runner.cache, config["num_hidden_layers"]
        assert len(cache.layers) == first + MODULES and not llm.runner.loaded.unused
        ids = prompts(llm.engine.vocab, (45,))[0]
        blocks = list(range(7, 10))
        whole = make_batch([Query(ids, 0, blocks)], block_tokens=cache.block_tokens, device="cpu")
        logits, hidden = llm.runner.run(whole)
        # h is the state after the final norm: the head alone gives the logits
        head = tensors["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
        assert torch.allclose(hidden @ head.T, logits, atol=1e-5 * float(logits.abs().max()))
        for k in range(MODULES):  # module k + 1 continues from module k's hidden states, one token further on
            ids, hidden = ids[1:], hidden[:-1]
            want, want_hidden = oracle(tensors, config, k, hidden, ids)
            got = []
            for start, stop in ((0, 12), (12, 13), (13, len(ids))):  # prefill, decode, chunk
                batch = make_batch(
                    [Query(ids[start:stop], start, blocks)], block_tokens=cache.block_tokens, device="cpu"
                )
                module = view_of(llm.runner.steps[batch.kind]).mtp[k]
                with torch.inference_mode():
                    got.append(module(hidden[start:stop], batch, cache.layers[first + k]))
            for i, wanted in enumerate((want, want_hidden)):
                rows = torch.cat([g[i] for g in got])
                assert (rows - wanted).abs().max() <= 1e-5 * wanted.abs().max()
            hidden = want_hidden


def test_the_formula_against_transformers(tmp_path):
    """Newer releases can run the modules; they too pass on the state after the final norm."""
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(layers, "MtpModel"):
        pytest.skip("not run: this transformers has no MtpModel")
    from transformers import DeepseekV3ForCausalLM

    config, tensors = write(tmp_path)
    model = DeepseekV3ForCausalLM.from_pretrained(tmp_path).eval()
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{config['num_hidden_layers'] + k}\." for k in range(MODULES)
    ]
    modules = layers.MtpModel.from_pretrained(model).eval()
    ids = prompts(160, (30,))[0]
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state
        for k in range(MODULES):
            ids, hidden = ids[1:], hidden[:, :-1]
            want, want_hidden = oracle(tensors, config, k, hidden[0], ids)
            places = torch.arange(len(ids))[None]
            hidden = modules.forward_layer(k, hidden, places, None, input_ids=torch.tensor([ids]))
            assert (hidden[0] - want_hidden).abs().max() <= 1e-5 * want_hidden.abs().max()
            assert (modules.shared_head(hidden)[0] - want).abs().max() <= 1e-5 * want.abs().max()


def test_loaded_only_when_asked(tmp_path):
    config, tensors = write(tmp_path)
    prompt = prompts(160, (20,))[0]
    results = []
    for mtp in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error", InferplaneWarning)  # all these names are expected
            llm = LLM(tmp_path, device="cpu", dtype="float32", mtp=mtp)
        behind = [n for n in tensors if int(n.split(".")[2] if "layers" in n else 0) >= config["num_hidden_layers"]]
        repeated = [n for n in behind if n.endswith(("embed_tokens.weight", "shared_head.head.weight"))]
        assert llm.runner.loaded.ignored == sorted(repeated if mtp else behind) and len(repeated) == 2 * MODULES
        assert len(llm.runner.model.mtp) == (MODULES if mtp else 0)
        results.append(llm.generate([prompt], SamplingParams(max_tokens=20, temperature=0))[0].token_ids)
        llm.close()
    assert results[0] == results[1]


def test_what_is_missing_is_named(tmp_path):
    _, tensors = write(tmp_path)
    del tensors["model.layers.4.hnorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    LLM(tmp_path, device="cpu", dtype="float32").close()
    with pytest.raises(CheckpointError, match=r"lacks 1 .*model\.layers\.4\.hnorm\.weight"):
        LLM(tmp_path, device="cpu", dtype="float32", mtp=True)
    config = llama_config()
    config.architectures = ["LlamaForCausalLM"]
    with pytest.raises(UsageError, match="no multi-token-prediction"):
        LLM(config, device="cpu", load_format="dummy", mtp=True)


def test_a_module_too_many_is_reported(tmp_path):
    """A tensor behind the modules that the config counts is not expected."""
    _, tensors = write(tmp_path)
    tensors["model.layers.5.enorm.weight"] = torch.ones(64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.warns(InferplaneWarning, match=r"1 tensor.*model\.layers\.5\.enorm\.weight"):
        LLM(tmp_path, device="cpu", dtype="float32").close()

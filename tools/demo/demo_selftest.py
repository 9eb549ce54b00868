"""Checks of the demo model's code at a tiny size: against transformers, against plain loops, and its formats."""

from __future__ import annotations

import re

import torch
import torch.nn.functional as F
from demo_data import train_tokenizer
from demo_format import (
    dequantize_blocks,
    from_hf_state,
    quantize_blocks,
    to_hf_state,
    transformers_model,
    transformers_mtp,
)
from demo_model import TINY, Model, MoE
from torch import Tensor
from train_loop import orthogonalize


def random_model() -> Model:
    """A tiny model with nothing at its initial value, norms and correction biases included."""
    torch.manual_seed(0)
    model = Model(TINY).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn_like(param) * 0.3 + (1.0 if param.dim() == 1 else 0.0))
        for module in model.modules():
            if isinstance(module, MoE):
                module.bias.copy_(torch.rand_like(module.bias) * 0.5)
    return model


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest reference value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def check_names(model: Model) -> None:
    """The published names and back give the same model."""
    again = from_hf_state(TINY, to_hf_state(model)).state_dict()
    assert all(torch.equal(v, again[k]) for k, v in model.state_dict().items()), "names do not round-trip"


@torch.no_grad()
def check_logits(model: Model) -> float:
    """Logits against transformers' DeepseekV3ForCausalLM."""
    tokens = torch.randint(0, TINY.vocab_size, (3, 33))
    theirs = transformers_model(TINY.to_hf(fp8=False), to_hf_state(model))(tokens, use_cache=False).logits
    error = relative_error(model.logits(model.states(tokens, torch.float32)), theirs)
    assert error < 1e-5, f"our logits and transformers' differ by {error:.1e}"
    return error


@torch.no_grad()
def check_mtp(model: Model) -> float | None:
    """The MTP layer's logits against transformers' MtpModel; None where transformers has none."""
    tokens = torch.randint(0, TINY.vocab_size, (2, 21))
    theirs = transformers_mtp(TINY.to_hf(fp8=False), to_hf_state(model), tokens)
    if theirs is None:
        return None
    states = model.states(tokens[:, :-1], torch.float32)
    error = relative_error(model.logits(model.mtp_states(tokens[:, 1:], states)), theirs)
    assert error < 1e-5, f"our MTP logits and transformers' differ by {error:.1e}"
    return error


def check_experts(model: Model) -> float:
    """The grouped experts' gradient against a loop over tokens and experts."""
    moe = next(m for m in model.modules() if isinstance(m, MoE))
    probe = torch.randn(17, TINY.hidden_size)
    x = torch.randn(17, TINY.hidden_size, requires_grad=True)
    y = x.detach().requires_grad_()
    fast = moe.routed(x)
    chosen, weights = moe.route(y)
    rows = []
    for n in range(17):
        row = torch.zeros(TINY.hidden_size)
        for e, weight in zip(chosen[n].tolist(), weights[n], strict=True):
            hidden = F.silu(moe.w13[e, 0] @ y[n]) * (moe.w13[e, 1] @ y[n])
            row = row + weight * (moe.w2[e] @ hidden)
        rows.append(row)
    plain = torch.stack(rows)
    (ours,) = torch.autograd.grad((fast * probe).sum(), x)
    (theirs,) = torch.autograd.grad((plain * probe).sum(), y)
    error = max(relative_error(fast, plain), relative_error(ours, theirs))
    assert error < 1e-5, f"the grouped experts are off by {error:.1e}"
    return error


def check_losses(model: Model) -> float:
    """The chunked loss and its gradient against torch's cross entropy; MTP must not see its own target."""
    window = torch.randint(0, TINY.vocab_size, (2, 12))
    main, ahead = model.losses(window, torch.float32)
    states = model.states(window[:, :-2], torch.float32)
    mtp_states = model.mtp_states(window[:, 1:-1], states)
    plain = F.cross_entropy(model.logits(states).flatten(0, 1), window[:, 1:-1].flatten())
    plain_ahead = F.cross_entropy(model.logits(mtp_states).flatten(0, 1), window[:, 2:].flatten())
    (ours,) = torch.autograd.grad(main + 0.3 * ahead, model.embed)
    (theirs,) = torch.autograd.grad(plain + 0.3 * plain_ahead, model.embed)
    error = max(relative_error(main, plain), relative_error(ahead, plain_ahead), relative_error(ours, theirs))
    assert error < 1e-5, f"the loss or its gradient is off by {error:.1e}"
    changed = window.clone()
    changed[:, -1] = (changed[:, -1] + 1) % TINY.vocab_size  # the last target only
    again = model.mtp_states(changed[:, 1:-1], model.states(changed[:, :-2], torch.float32))
    assert torch.equal(again, mtp_states), "the MTP layer sees its own target"
    return error


def check_fp8() -> float:
    """FP8 blocks and back, with edges that do not fill a block."""
    w = torch.randn(300, 200)
    q, scale = quantize_blocks(w)
    error = relative_error(dequantize_blocks(q, scale), w)
    assert scale.shape == (3, 2) and error < 2**-4, f"FP8 blocks {tuple(scale.shape)} are off by {error:.1e}"
    return error


def check_muon() -> tuple[float, float]:
    """Singular values after the Newton-Schulz iteration, which aims at a band around 1."""
    s = torch.linalg.svdvals(orthogonalize(torch.randn(4, 64, 96)).float())
    low, high = s.min().item(), s.max().item()
    assert low > 0.3 and high < 1.6, f"singular values {low:.2f} to {high:.2f} after orthogonalization"
    return low, high


def check_tokenizer() -> None:
    """Any text survives encoding and decoding."""
    texts = [
        "def f(x):\n\treturn x  # naïve — 你好 🙂\r\n",
        " \n\n  \x00\x7f\u200b e\u0301 \u2028\x85\xa0",
        "1234567 a_b.c(*d) != \\'x\\'\n" * 9,
    ]
    tok = train_tokenizer(texts, 280)
    for text in texts:
        back = tok.decode(tok.encode(text).ids, skip_special_tokens=False)
        assert back == text, f"{text!r} comes back as {back!r}"
    assert re.fullmatch(r"<\|\w+\|>", tok.id_to_token(1)), "the special tokens are not the first ones"


def selftest() -> None:
    """All checks; an AssertionError says which one failed."""
    model = random_model()
    check_names(model)
    print(f"logits against transformers' DeepseekV3ForCausalLM: relative error {check_logits(model):.1e}")
    error = check_mtp(model)
    shown = "not run, this transformers has no MtpModel" if error is None else f"relative error {error:.1e}"
    print(f"MTP logits against transformers' MtpModel: {shown}")
    print(f"experts and their gradient against a loop: relative error {check_experts(model):.1e}")
    print(f"losses and their gradient against torch's: relative error {check_losses(model):.1e}")
    print(f"FP8 blocks: relative error {check_fp8():.1e}")
    low, high = check_muon()
    print(f"Newton-Schulz: singular values {low:.2f} to {high:.2f}")
    check_tokenizer()
    print("tokenizer round-trips; all checks passed")

"""Layers with norms before and after each block, weights without their 1, GELU and two windows, as Gemma has them."""

import pytest
import torch

from inferplane.binding import view_of
from inferplane.conformance import stepping
from inferplane.conformance.configs import model
from inferplane.conformance.subject import Subject
from inferplane.ops import CausalLM
from inferplane.plugins import host
from inferplane_cpu.kernels.model import native_stack
from inferplane_cpu.native import instruction_sets, native, use_instruction_set

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")

GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 20,
    "sliding_window_pattern": 3,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
GEMMA_2 = {
    **{key: value for key, value in GEMMA_3.items() if "pattern" not in key and "local" not in key},
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
}
RUNS = {"gemma2": [(0, 1, 0), (1, 1, 0), (2, 1, 0), (3, 1, 0)], "gemma3": [(0, 2, 0), (2, 1, 0), (3, 1, 0)]}
"""First layer, number of layers and block table of each run of layers with one window."""
FEW = {
    "tokens": lambda sequence, done, total: 1 if done else total - 12,
    "drafts": lambda sequence, done, total: (1, 4, 2)[sequence] if done else total - 12,
}


def bound_model(tree, weights, without=()):
    """The bound model, and the names of what its sites of layers are bound to in steps of few tokens."""
    subject = Subject.of(host(), "cpu", "bfloat16")
    subject.kernels = [k for k in subject.kernels if k.op not in without]
    bound = stepping.on_device(subject, tree, torch.bfloat16, weights, 40)
    ops = ("decoder_stack", "residual_layer")
    return bound, {op.name: choice.label for _, op, choice in bound.plan.sites("decode") if op.name in ops}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("schedule", FEW)
@pytest.mark.parametrize("family", RUNS)
def test_layers_of_gemma_in_one_call(family, name, schedule):
    """One call for each run of layers gives what each layer gives, to the bit, and what smaller kernels give."""
    tree = model({"gemma2": GEMMA_2, "gemma3": GEMMA_3}[family])
    weights = stepping.draw_weights(tree, torch.bfloat16)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 97, (n - 1,), generator=draw).tolist() for n in (40, 37, 29)]
    with use_instruction_set(name):
        (stack, labels), (each, _) = bound_model(tree, weights), bound_model(tree, weights, ("decoder_stack",))
        small, parts = bound_model(tree, weights, ("decoder_stack", "residual_layer"))
        chained, single, apart = (stepping.run(bound, prompts, FEW[schedule]) for bound in (stack, each, small))
    assert labels == {"decoder_stack": "native:decoder_stack", "residual_layer": "native:residual_layer"}
    assert "native" not in "".join(parts.values())
    runs = native_stack(view_of(view_of(stack.steps["decode"]).layers)).find_runs(())
    assert runs == RUNS[family]
    for one, other, least in zip(chained, single, apart, strict=True):
        assert torch.equal(one, other)
        assert (one - least).abs().max() <= CausalLM.tolerance[torch.bfloat16] * least.abs().max()

"""Steps of Gemma, gpt-oss and Qwen 3.5 as one call: norms before and after, caps, scales, sinks, MXFP4 experts, two
windows, states beside entries of tokens, gates."""

import pytest
import torch

from inferplane.binding import view_of
from inferplane.conformance import stepping
from inferplane.conformance.subject import Subject
from inferplane.models import Build, Config, build
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
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 20,
    "max_position_embeddings": 256,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "rope_parameters": None,
}
QWEN_3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 0.01,  # or norms of results near 0 scale them up to mere rounding
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
FAMILIES = {
    **{"gemma2": GEMMA_2, "gemma3": GEMMA_3, "gpt_oss": GPT_OSS, "gpt_oss_mxfp4": GPT_OSS},
    **{"qwen3_5": QWEN_3_5, "qwen3_5_panels": QWEN_3_5},
}
QUANTIZED = ("_proj.weight", "_proj_qkv.weight", "_proj_z.weight")
FORMATS = {
    "gpt_oss_mxfp4": lambda name: "mxfp4" if ".experts." in name else "plain",
    "qwen3_5_panels": lambda name: "int8_group" if name.endswith(QUANTIZED) else "plain",
}
"""Of weights by their names; layers are then bound to a kernel with the family's last word in its name."""
FEW = {
    "tokens": lambda sequence, done, total: 1 if done else total - 12,
    "drafts": lambda sequence, done, total: (1, 4, 2)[sequence] if done else total - 12,
}


def bound_model(tree, weights, without=()):
    """The bound model, and the names of what its sites of layers are bound to in steps of few tokens."""
    subject = Subject.of(host(), "cpu", "bfloat16")
    subject.kernels = [k for k in subject.kernels if k.op not in without]
    bound = stepping.on_device(subject, tree, torch.bfloat16, weights, 40)
    ops = ("causal_lm", "decoder_stack", "residual_layer", "decoder_layer")
    return bound, {op.name: choice.label for _, op, choice in bound.plan.sites("decode") if op.name in ops}


def build_model(family):
    more = {"format_of": FORMATS[family]} if family in FORMATS else {}
    return build(Build(Config(FAMILIES[family]), positions=256, **more))


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("schedule", FEW)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_one_call(family, name, schedule):
    """One call gives what a call for each layer gives, to the bit, and what smaller kernels give."""
    tree = build_model(family)
    layer = tree.layers[0].name
    weights = stepping.draw_weights(tree, torch.bfloat16)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 97, (n - 1,), generator=draw).tolist() for n in (40, 37, 29)]
    with use_instruction_set(name):
        whole, labels = bound_model(tree, weights)
        stack, each = (bound_model(tree, weights, (op,))[0] for op in ("causal_lm", "decoder_stack"))
        small, parts = bound_model(tree, weights, ("decoder_stack", layer))
        chained, middle, single, apart = (
            stepping.run(bound, prompts, FEW[schedule]) for bound in (whole, stack, each, small)
        )
    of_layer = f"native:{layer}{family[family.rindex('_') :] if family in FORMATS else ''}"
    assert labels == {"causal_lm": "native:causal_lm", "decoder_stack": "native:decoder_stack", layer: of_layer}
    assert "native" not in "".join(parts.values())
    assert native_stack(view_of(whole.steps["decode"]).layers).fits
    for one, two, other, least in zip(chained, middle, single, apart, strict=True):
        assert torch.equal(one, other) and torch.equal(two, other)
        assert (one - least).abs().max() <= CausalLM.tolerance[torch.bfloat16] * least.abs().max()

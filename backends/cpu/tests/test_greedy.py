"""Greedy text of whole models on native kernels, in bfloat16, against the ops' own bodies in float32.

The reference reads what the native path wrote, token by token: at each place the native token must be the reference's,
or so near to it that the model's tolerance in bfloat16 cannot tell them apart.
"""

import pytest
import torch

from inferplane import LLM, SamplingParams
from inferplane.ops import CausalLM
from inferplane_cpu.native import instruction_sets, native, use_instruction_set
from tests.e2e.tiny_models import deepseek_config, llama_config, make, prompts, random_model
from tests.families.cases import config_of

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
MODELS = ("llama", "qwen3", "qwen3_moe", "deepseek", "gemma3", "gpt_oss")
TOKENS = 64
ROOM = CausalLM.tolerance[torch.bfloat16]
FEWEST_EQUAL = 0.8
"""Share of tokens that are the reference's own; random weights leave many a pair of logits next to each other."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models with weights that bfloat16 holds exactly, so that both sides compute the same function."""
    made = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    models = {
        "llama": random_model(llama_config(), seed=3),
        "qwen3": make("qwen3", "yarn", made["qwen3"]),
        "qwen3_moe": make("qwen3_moe", "plain", made["qwen3_moe"]),
        "deepseek": random_model(deepseek_config(num_hidden_layers=2, moe_intermediate_size=48), seed=3),
        "gemma3": random_model(config_of("gemma3", "logit_cap"), seed=3),
        "gpt_oss": random_model(config_of("gpt_oss", "all_experts"), seed=3),
    }
    for name, model in models.items():
        model.to(torch.bfloat16).save_pretrained(made[name])
    return made


def reference(folder):
    """Every op by its own body, in float32."""
    return LLM(folder, device="cpu", dtype="float32", ops={"*": "reference"}, enable_prefix_caching=False)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_are_those_of_the_reference(model, name, folders):
    asked = prompts(101, (5, 40), seed=3)
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    with (
        use_instruction_set(name),
        LLM(folders[model], device="cpu", dtype="bfloat16", enable_prefix_caching=False) as llm,
    ):
        sites = llm.explain()["sites"]
        for ops in (("causal_lm",), ("decoder_layer", "residual_layer")):
            assert "native" in {s["chosen"]["provider"] for s in sites if s["op"] in ops}
        written = [r.token_ids for r in llm.generate(asked, params)]
    with reference(folders[model]) as llm:
        logits = llm.logits([p + w[:-1] for p, w in zip(asked, written, strict=True)])
    equal = 0
    for prompt, tokens, found in zip(asked, written, logits, strict=True):
        at = found[len(prompt) - 1 :]
        assert len(at) == len(tokens) == TOKENS
        taken, best = at.gather(1, torch.tensor(tokens)[:, None])[:, 0], at.amax(1)
        assert (best - taken <= 2 * ROOM * at.abs().amax(1)).all()
        equal += int((at.argmax(1) == torch.tensor(tokens)).sum())
    assert equal >= FEWEST_EQUAL * TOKENS * len(asked), equal

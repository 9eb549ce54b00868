"""A cache of 4 bits on native layers: what they write is what core's storage rounds to."""

import pytest
import torch

from inferplane.conformance import stepping
from inferplane.ops import CausalLM
from inferplane_cpu.native import instruction_sets, native, use_instruction_set
from tests.unit.support.small import tiny_llama

from .test_layers import EACH, LENGTHS, SCHEDULES, SMALL, bound_model

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def held(bound):
    """The tensors of each layer's cache but for padding; ranges as numbers, since zeros have two signs."""
    for kv in bound.cache.layers:
        yield [t.float().nan_to_num(7.0) for t in kv.list_tensors()]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("kv_dtype", ["int4", "k8v4"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whole_layers_write_and_read_what_smaller_kernels_do(name, kv_dtype, schedule):
    """One call for all layers, layer by layer, and in parts, of which torch writes: to the last bit of every cache."""
    made = tiny_llama(**HEADS)
    weights = stepping.draw_weights(made, torch.bfloat16)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 97, (n - 1,), generator=draw).tolist() for n in LENGTHS["ragged"]]
    logits, caches = [], []
    with use_instruction_set(name):
        for without in ((), EACH, SMALL):
            bound = bound_model(made, weights, 40, without, kv_dtype)
            logits.append(stepping.run(bound, prompts, SCHEDULES[schedule]))
            caches.append(list(held(bound)))
    for one, other, small in zip(*logits, strict=True):
        assert torch.equal(one, other)
        assert (one - small).abs().max() <= CausalLM.tolerance[torch.bfloat16] * small.abs().max()
    for one, other in zip(caches[0], caches[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    # The first layer sees the same inputs in all three ways.
    assert all(torch.equal(a, b) for a, b in zip(caches[0][0], caches[2][0], strict=True))
    assert all(t.any() for t in caches[0][0])


@pytest.mark.parametrize("name", SETS)
def test_entries_of_all_sizes_are_written_as_torch_rounds_them(name):
    """Values of a head from its largest down through scales below float16's numbers, and heads of zeros; in prompts of
    many tokens, several spans of which are written in one step, and in steps of few."""
    made = tiny_llama(**HEADS)
    weights = stepping.draw_weights(made, torch.bfloat16)
    for key in {id(op.qkv.weight) for _, op in made.sites() if hasattr(op, "qkv")}:
        rows = weights[key]
        rows *= 2.0 ** -(torch.arange(len(rows)) // 4 % 24)[:, None]
        rows[-64:] = 0
    found = []
    with use_instruction_set(name):
        for without in ((), SMALL):
            bound = bound_model(made, weights, 70, without, "int4")
            stepping.run(bound, [list(range(69)), [3] * 20], SCHEDULES["drafts"])
            found.append(next(held(bound)))
    assert all(torch.equal(one, small) for one, small in zip(*found, strict=True))

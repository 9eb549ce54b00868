"""A cache in FP8 on native layers: what they write is what core's storage rounds to, in entries of every size."""

import pytest
import torch

from inferplane.conformance import stepping
from inferplane.ops import CausalLM
from inferplane_cpu.native import instruction_sets, native, use_instruction_set
from tests.unit.support.small import tiny_llama

from .test_layers import EACH, LENGTHS, SCHEDULES, SMALL, bound_model, latents_and_experts

SETS = instruction_sets()
pytestmark = pytest.mark.skipif(not SETS, reason=f"not run: {native().reason}")


def held(bound):
    """Entries and scales of each layer but for the slot of padding, FP8 as its bits."""
    for kv in bound.cache.layers:
        yield [
            t[:-1].view(torch.uint8) if t.dtype is torch.float8_e4m3fn else t[:-1] for t in (*kv.entries, *kv.scales)
        ]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("tree", ["grouped", "latents"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_whole_layers_write_and_read_what_smaller_kernels_do(name, tree, schedule):
    """One call for all layers, layer by layer, and in parts, of which torch writes: to the last bit of every cache."""
    made = tiny_llama() if tree == "grouped" else latents_and_experts("plain")
    weights = stepping.draw_weights(made, torch.bfloat16, steady_routes=True)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 97, (n - 1,), generator=draw).tolist() for n in LENGTHS["ragged"]]
    logits, caches = [], []
    with use_instruction_set(name):
        for without in ((), EACH, SMALL):
            bound = bound_model(made, weights, 40, without, "fp8")
            logits.append(stepping.run(bound, prompts, SCHEDULES[schedule]))
            caches.append(list(held(bound)))
    for one, other, small in zip(*logits, strict=True):
        assert torch.equal(one, other)
        assert (one - small).abs().max() <= CausalLM.tolerance[torch.bfloat16] * small.abs().max()
    for one, other in zip(caches[0], caches[1], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    # The first layer sees the same inputs in all three ways.
    assert all(torch.equal(a, b) for a, b in zip(caches[0][0], caches[2][0], strict=True))


@pytest.mark.parametrize("name", SETS)
def test_entries_of_all_sizes_are_written_as_torch_rounds_them(name):
    """Values of a head from its largest down through the smallest FP8 numbers, and zeros."""
    made = tiny_llama()
    weights = stepping.draw_weights(made, torch.bfloat16)
    for key in {id(op.qkv.weight) for _, op in made.sites() if hasattr(op, "qkv")}:
        rows = weights[key]
        rows *= 2.0 ** -(torch.arange(len(rows)) % 24)[:, None]
        rows[-1] = rows[-3] = 0
    found = []
    with use_instruction_set(name):
        for without in ((), SMALL):
            bound = bound_model(made, weights, 70, without, "fp8")
            stepping.run(bound, [list(range(69)), [3] * 20], SCHEDULES["tokens"])
            found.append(next(held(bound)))
    values = found[0][1]
    assert ((values & 0x78 == 0) & (values & 7 > 0)).any(), "none is subnormal"
    assert all(torch.equal(one, small) for one, small in zip(*found, strict=True))

"""Every family on the emulator, with the head sizes that the vendor's operators know, beside the cpu backend.

In the vendor's dtypes by the logits' error against float32; with the one check of dtypes lifted, at float32, by tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferplane.binding import explain
from inferplane.conformance import stepping
from inferplane.conformance.subject import Subject
from inferplane.models.registry import ARCHITECTURES
from inferplane.ops import CausalLM, Linear, MoERoute
from inferplane.plugin import Kernel
from inferplane.plugins import host
from inferplane.types.batch import Query, make_batch
from tests.vendors.npu import chip
from tests.vendors.npu.configs import EXPERTS, FAMILIES, model

LENGTHS = (135, 9, 20)
LARGEST_ERROR, OVER_CPU = 3e-2, 1.25
TOKENS = 64

narrow = pytest.mark.skipif(chip.LIFTED, reason="in the vendor's dtypes: without INFERPLANE_EMULATED_FLOAT32")
wide = pytest.mark.skipif(not chip.LIFTED, reason="at float32: with INFERPLANE_EMULATED_FLOAT32=1")


def test_every_family_is_here():
    names = {name for config in FAMILIES.values() for name in config["architectures"]}
    assert names == set(ARCHITECTURES), "a family without a configuration in configs.py"


def draw(tree: CausalLM, dtype: torch.dtype) -> dict[int, Any]:
    """Random weights; biases around 0, for those around 1 would drown what the matrices say."""
    drawn = stepping.draw_weights(tree, dtype)
    for _, op in tree.sites():
        if isinstance(op, Linear) and op.bias is not None:
            drawn[id(op.bias)] = drawn[id(op.bias)] - 1.0
    return drawn


class Routes:
    """The experts that the float32 model chose, call by call: a rounding must not send a token elsewhere, which no
    tolerance could cover.
    """

    def __init__(self, monkeypatch):
        self.chosen = []
        self.at = 0
        body = MoERoute.__call__

        def recording(op, logits):
            weights, ids = body(op, logits)
            self.chosen.append(ids)
            return weights, ids

        monkeypatch.setattr(MoERoute, "__call__", recording)

    def kernel(self):
        """A kernel that outranks all others and takes the recorded experts."""

        def replayed(p, logits):
            ids = self.chosen[self.at]
            self.at += 1
            scores = logits.float().sigmoid() if p.score == "sigmoid" else logits.float().softmax(-1)
            weights = scores.gather(1, ids)
            return (weights / (weights.sum(-1, keepdim=True) + 1e-20) if p.renormalize else weights) * p.factor, ids

        return Kernel("moe_route", "test", replayed, rank=99)


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in LENGTHS]


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Relative L2 error over all logits."""
    return (torch.cat(got) - torch.cat(want)).norm().item() / torch.cat(want).norm().item()


def cases():
    if chip.ARCH == "950":  # the 910b's kernels, but for FP8
        return
    for family in FAMILIES:
        yield family, "plain", "whole_prompt"
    for family in ("llama", "llama_head_64", "mistral_window", "deepseek_v3"):
        yield from ((family, "plain", schedule) for schedule in ("ragged", "token_by_token"))
    for family in ("llama", "qwen3_moe", "deepseek_v3"):
        yield from ((family, weights, "ragged") for weights in ("int8_row", "int4_group"))


@narrow
@pytest.mark.parametrize(("family", "weights", "schedule"), [pytest.param(*c, id="-".join(c)) for c in cases()])
def test_error_beside_cpu(family, weights, schedule, monkeypatch, record_property):
    config = FAMILIES[family]
    tree = model(config, weights)
    drawn = draw(tree, chip.DTYPE)
    many, cut = prompts(config["vocab_size"]), stepping.SCHEDULES[schedule]
    routes = Routes(monkeypatch)
    want = stepping.run(stepping.on_references(tree, drawn, max(LENGTHS)), many, cut)
    assert (family in EXPERTS) == bool(routes.chosen)
    found = {}
    for device in ("cpu", "npu"):
        subject = Subject.of(host(), device, str(chip.DTYPE).removeprefix("torch."))
        subject.kernels.append(routes.kernel())
        routes.at = 0
        bound = stepping.on_device(subject, tree, chip.DTYPE, drawn, max(LENGTHS))
        got = stepping.run(bound, many, cut)
        assert routes.at == len(routes.chosen)
        assert all(torch.isfinite(t).all() for t in got)
        found[device] = error(got, want)
    record_property("error", found)
    print(f"\n{family} {weights} {schedule}: npu {found['npu']:.4f}, cpu {found['cpu']:.4f}")
    assert found["npu"] <= LARGEST_ERROR, found
    assert found["npu"] <= OVER_CPU * found["cpu"], found


def greedy(bound: stepping.Bound, prompt: list[int], chunk: int) -> list[int]:
    """The prompt in chunks, then token by token, always the likeliest."""
    blocks = list(range(bound.cache.blocks))[::-1]
    done, ids, new = 0, list(prompt), []
    with torch.inference_mode():
        while len(new) < TOKENS:
            part = ids[done : done + chunk]
            query = Query(part, done, blocks[: -(-(done + len(part)) // bound.cache.block_tokens)], 1)
            batch = make_batch([query], block_tokens=bound.cache.block_tokens, device=bound.device)
            logits = bound.steps[batch.kind](batch, bound.cache)[0]
            done += len(part)
            if done == len(ids):
                new.append(int(logits[-1].argmax()))
                ids.append(new[-1])
    return new


def wide_cases():
    for family in FAMILIES:
        yield family, "plain", 1000
    yield from (("llama", "plain", 7), ("deepseek_v3", "plain", 40), ("mistral_window", "plain", 33))
    for family in ("llama", "qwen3_moe", "deepseek_v3"):
        yield from ((family, weights, 1000) for weights in ("int8_row", "int4_group"))


@wide
@pytest.mark.parametrize(("family", "weights", "chunk"), list(wide_cases()), ids=str)
def test_greedy_tokens_are_those_of_cpu(family, weights, chunk):
    config = FAMILIES[family]
    tree = model(config, weights)
    drawn = draw(tree, torch.float32)
    prompt = prompts(config["vocab_size"])[0][:100]
    tokens = {}
    for device in ("cpu", "npu"):
        bound = stepping.on_device(Subject.of(host(), device, "float32"), tree, torch.float32, drawn, 200)
        tokens[device] = greedy(bound, prompt, chunk)
        if device == "npu":
            served = [s["chosen"]["kernel"] for s in explain(bound.plan)["sites"]]
            assert any("attention" in k or "mla" in k for k in served if k.startswith(("torch_npu", "atb"))), served
    assert tokens["npu"] == tokens["cpu"]
    assert len(set(tokens["cpu"])) > 4, "a text worth comparing"

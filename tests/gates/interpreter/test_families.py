"""Every family of models on the cuda backend in Triton's interpreter, beside the bodies of its ops in float32.

What the plan binds runs as it would on a GPU: portable kernels interpreted, torch's operators on the host.
"""

from __future__ import annotations

import pytest
import torch

from inferplane.binding import explain
from inferplane.conformance import stepping
from inferplane.conformance.subject import Subject
from inferplane.models import ARCHITECTURES
from inferplane.plugins import discover
from tests.vendors.configs import FAMILIES, model

LENGTHS = (11, 2)
FIRST = {config["architectures"][0]: config for config in reversed(FAMILIES.values())}
"""The first config of each architecture."""
LARGEST_ERROR = 1e-4
"""Relative L2 error over all logits."""


def chunk_then_tokens(sequence: int, done: int, total: int) -> int:
    """A step with a prompt of nine tokens beside two, then decode steps."""
    return 1 if done else 9


@pytest.fixture(scope="module")
def subject():
    return Subject.of(discover("only,tests.gates.interpreter.device"), "cuda", "float32")


def test_every_family_is_here():
    assert FIRST.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", FIRST)
def test_agrees_with_the_bodies(subject, architecture, record_property):
    tree = model(FIRST[architecture])
    drawn = stepping.draw_weights(tree, torch.float32, steady_routes=True)
    generator = torch.Generator().manual_seed(1)
    vocab = FIRST[architecture]["vocab_size"]
    prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in LENGTHS]
    want = stepping.run(stepping.on_references(tree, drawn, max(LENGTHS)), prompts, chunk_then_tokens)
    bound = stepping.on_device(subject, tree, torch.float32, drawn, max(LENGTHS))
    got = stepping.run(bound, prompts, chunk_then_tokens)
    error = ((torch.cat(got) - torch.cat(want)).norm() / torch.cat(want).norm()).item()
    record_property("error", error)
    chosen = {site["chosen"]["provider"] for site in explain(bound.plan)["sites"]}
    assert "triton" in chosen
    assert error <= LARGEST_ERROR

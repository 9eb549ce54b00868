"""Rotary tables against their formulas in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from inferplane.errors import CheckpointError, UnsupportedModelError
from inferplane.models.rope import frequencies, mscale, rope_table

DIM = 64
PLAIN = [500000.0 ** (-2 * i / DIM) for i in range(DIM // 2)]
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}


def close(got, want):
    return torch.allclose(got.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=0)


def test_tables_are_angles():
    weight = rope_table({"rope_type": "default", "rope_theta": 500000.0}, DIM, 300)
    table = weight.make()
    assert tuple(table.shape) == weight.shape == (300, 2, DIM // 2) and table.dtype == weight.dtype == torch.float32
    angle = torch.arange(300.0, dtype=torch.float64)[:, None] * torch.tensor(PLAIN, dtype=torch.float64)
    assert (table[:, 0] - angle.cos()).abs().max() < 2e-5 and (table[:, 1] - angle.sin()).abs().max() < 2e-5
    assert torch.equal(rope_table({"rope_type": "default", "rope_theta": 500000.0}, DIM, 7).make(), table[:7])


def test_linear():
    got, factor = frequencies({"rope_type": "linear", "rope_theta": 500000.0, "factor": 8.0}, DIM)
    assert close(got, [f / 8 for f in PLAIN]) and factor == 1


def test_dynamic():
    """Up to the context as without scaling; beyond it each position turns as the last one of its sequence."""
    rope = {"rope_type": "dynamic", "rope_theta": 500000.0, "factor": 4.0, "max_position_embeddings": 100}
    table = rope_table(rope, DIM, 130).make().double()
    for p in range(130):
        base = 500000.0 * (4.0 * max(p + 1, 100) / 100 - 3.0) ** (DIM / (DIM - 2))
        angle = torch.tensor([p * base ** (-2 * i / DIM) for i in range(DIM // 2)], dtype=torch.float64)
        assert (table[p, 0] - angle.cos()).abs().max() < 2e-5 and (table[p, 1] - angle.sin()).abs().max() < 2e-5
    assert torch.equal(rope_table(rope, DIM, 7).make(), rope_table({**rope, "rope_type": "default"}, DIM, 7).make())
    with pytest.raises(CheckpointError, match="lacks 'max_position_embeddings'"):
        rope_table({**rope, "max_position_embeddings": None}, DIM, 10)
    with pytest.raises(CheckpointError, match="more than 2 rotated"):
        rope_table(rope, 2, 10)


def test_llama3():
    """Waves shorter than 8192 / 4 positions stay, longer than 8192 / 1 are stretched 32 times, between they blend."""
    got, factor = frequencies(LLAMA3, DIM)
    want, kinds = [], set()
    for f in PLAIN:
        wave = 2 * math.pi / f
        if wave < 8192 / 4:
            want.append(f)
            kinds.add("kept")
        elif wave > 8192:
            want.append(f / 32)
            kinds.add("stretched")
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            want.append((1 - smooth) * f / 32 + smooth * f)
            kinds.add("blended")
    assert close(got, want) and factor == 1 and len(kinds) == 3


def test_yarn():
    """Pairs that turn more than 32 times in the original context stay, those that turn less than once are stretched."""
    got, factor = frequencies(YARN, DIM)
    plain = [10000.0 ** (-2 * i / DIM) for i in range(DIM // 2)]
    turns = [4096 * f / (2 * math.pi) for f in plain]
    for g, f, t in zip(got.tolist(), plain, turns):
        assert f / 40 * (1 - 1e-5) <= g <= f * (1 + 1e-5)
        if t > 45:
            assert g == pytest.approx(f, rel=1e-6)
        if t < 0.7:
            assert g == pytest.approx(f / 40, rel=1e-6)
    share = [(g / f - 1 / 40) / (1 - 1 / 40) for g, f in zip(got.tolist(), plain)]
    ramp = [s for s in share if 1e-4 < s < 1 - 1e-4]
    steps = [a - b for a, b in itertools.pairwise(ramp)]
    assert len(ramp) > 5 and max(steps) == pytest.approx(min(steps), rel=1e-2)  # straight between
    assert factor == pytest.approx(0.1 * math.log(40) + 1)
    table = rope_table(YARN, DIM, 2).make()
    assert torch.allclose(table[0, 0], torch.full((DIM // 2,), factor)) and not table[0, 1].any()


def test_yarn_temperatures():
    assert mscale(1.0) == mscale(0.5, 3.0) == 1 and mscale(40.0, 0.7) == pytest.approx(0.07 * math.log(40) + 1)
    for more, want in (
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.7, "mscale_all_dim": 1.0}, mscale(40.0, 0.7) / mscale(40.0, 1.0)),
        ({"mscale": 0.7}, mscale(40.0)),
        ({"attention_factor": 1.25, "mscale": 0.7, "mscale_all_dim": 1.0}, 1.25),
    ):
        assert frequencies({**YARN, **more}, DIM)[1] == pytest.approx(want)
    del (implied := dict(YARN))["original_max_position_embeddings"]
    assert torch.equal(frequencies({**implied, "max_position_embeddings": 4096}, DIM)[0], frequencies(YARN, DIM)[0])
    assert not torch.equal(frequencies({**YARN, "truncate": False}, DIM)[0], frequencies(YARN, DIM)[0])


def test_what_is_not_implemented_is_refused():
    whole = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1.0}
    with pytest.raises(UnsupportedModelError, match=r"partial_rotary_factor = 0\.5"):
        rope_table({**whole, "partial_rotary_factor": 0.5}, DIM, 10)
    rope_table({**whole, "partial_rotary_factor": 1.0}, DIM, 10)
    with pytest.raises(UnsupportedModelError, match=r"'mrope'.*default, linear, dynamic, llama3, yarn, longrope"):
        rope_table({"rope_type": "mrope", "rope_theta": 1.0}, DIM, 10)

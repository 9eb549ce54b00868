"""Rotating a model's residual stream: logits stay, outliers go, and what would change is refused."""

from __future__ import annotations

import json

import pytest
import torch

from inferplane import LLM
from inferplane.calibrate import (
    CalibrationSettings,
    Rotation,
    calibrate,
    load_methods,
    make_recipe,
    rotate,
    rotates_inner,
)
from inferplane.calibrate.layers import LayeredModel
from inferplane.calibrate.rotations import Rotated, RotatedSource
from inferplane.engine import ModelFiles
from inferplane.errors import UnsupportedModelError
from inferplane.models.build import Build
from inferplane.models.registry import build
from inferplane.models.writing.model_to_quantize import ModelToQuantize
from inferplane.models.writing.quantize import quantize_checkpoint
from inferplane.ops import RotatedActivation
from inferplane.plugins import host
from inferplane.types import Shard
from tests.e2e.tiny_models import llama_config, random_model
from tests.families.cases import ALL_CASES, make
from tests.unit.calibrate.test_layers import logits_by_layers

REFUSED = {
    "layer norms": ["cohere", "cohere2", "starcoder2", "phimoe"],
    "norms behind sublayers": ["glm4", "olmo2", "olmo3", "exaone4", "gemma2", "gemma3", "flex_olmo"],
    "factors between norm and product": ["llama4", "falcon_h1"],
    "a product within a block, as wide as the hidden state": ["kimi_linear"],
    "experts that return what they read": ["longcat_flash"],
    "several residual streams": ["deepseek_v4"],
}
"""Families whose first config cannot be rotated, and why."""


def origin_of(model) -> ModelToQuantize:
    files = ModelFiles(model)
    return ModelToQuantize(str(model), files.config_of_tensors(), files.source(), files.folder, files.weight_files())


def layered(origin: ModelToQuantize) -> LayeredModel:
    return LayeredModel(build(Build(origin.config, positions=128)), origin.source, {})


def random_ids(vocab: int, count: int = 24) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("size", [1, 7, 64, 96, 576, 640, 1024])
@pytest.mark.parametrize("seed", [None, 5])
def test_a_rotation_is_orthogonal(size, seed):
    rotation = Rotation(size, seed)
    q = rotation.columns(torch.eye(size))
    assert (q @ q.T - torch.eye(size)).abs().max() <= 1e-5
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    assert (rotation.columns(x) - x @ q).abs().max() <= 1e-5
    assert (rotation.rows(x.T) - q.T @ x.T).abs().max() <= 1e-5
    assert torch.equal(q, Rotation(size, seed).columns(torch.eye(size)))


def test_outliers_are_spread():
    x = torch.randn(64, 576, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 100
    before, after = (t.abs().amax(1) / t.square().mean(1).sqrt() for t in (x, Rotation(576, 1).columns(x)))
    assert before.mean() > 10 and after.mean() < 6


@pytest.mark.parametrize("family", ALL_CASES)
def test_logits_stay(family, tmp_path):
    """Or the model is refused: never a wrong copy."""
    make(family, next(iter(ALL_CASES[family])), tmp_path)
    origin = origin_of(tmp_path)
    ids = random_ids(int(origin.config["vocab_size"]))
    if any(family in families for families in REFUSED.values()):
        with pytest.raises(UnsupportedModelError, match=r"cannot be rotated: .* would return something else"):
            rotate(origin, ids, 1)
        return
    rotated = rotate(origin, ids, 1)
    other = ids[::-1]
    want, got = (logits_by_layers(layered(each), other) for each in (origin, rotated))
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    assert sum(change.columns is not None for change in rotated.source.changes.values()) > len(
        layered(origin).model.layers
    )


def test_written_with_two_tensors_for_embedding_and_head(tmp_path):
    make("gemma", next(iter(ALL_CASES["gemma"])), tmp_path / "model")
    origin = origin_of(tmp_path / "model")
    assert origin.config["tie_word_embeddings"]
    ids = random_ids(int(origin.config["vocab_size"]))
    recipe = make_recipe(["rotate", "nearest"], load_methods(host().calibration()))
    settings = CalibrationSettings(recipe, [ids])
    quantize_checkpoint(
        rotate(origin, ids),
        "weight_only_int8",
        tmp_path / "copy",
        "test",
        None,
        lambda copy: calibrate(copy, settings, tmp_path / "copy.calibration"),
    )
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "embedding and the head are two tensors" in (tmp_path / "copy" / "README.md").read_text()
    files = ModelFiles(tmp_path / "copy")
    assert "lm_head.weight" in " ".join(files.source().names())


@pytest.mark.parametrize("family", ["llama", "gemma", "mixtral", "deepseek_v2", "qwen2_moe", "phi3"])
def test_what_down_reads_is_rotated_while_running(family, tmp_path):
    """In dense MLPs and shared experts, and logits stay."""
    make(family, next(iter(ALL_CASES[family])), tmp_path)
    origin = origin_of(tmp_path)
    ids = random_ids(int(origin.config["vocab_size"]))
    rotated = rotate(origin, ids, 1, inner=True)
    want, got = (logits_by_layers(layered(each), ids[::-1]) for each in (origin, rotated))
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    tree = layered(rotated).model
    acts = [op.act for _, op in tree.sites() if op.is_gated_mlp]
    assert all(isinstance(act, RotatedActivation) and act.block > 1 for act in acts)
    assert ("transform_config" in rotated.changes) == bool(acts) == (family != "mixtral")


def test_a_copy_states_its_rotation_and_answers_with_it(tmp_path):
    config = llama_config(hidden_size=128, intermediate_size=192, tie_word_embeddings=False)
    random_model(config, seed=3).save_pretrained(tmp_path / "model")
    origin = origin_of(tmp_path / "model")
    ids = random_ids(int(origin.config["vocab_size"]), 40)
    recipe = make_recipe(["rotate", "gptq"], load_methods(host().calibration()))
    settings = CalibrationSettings(recipe, [ids])
    assert rotates_inner("a4w4") and rotates_inner("a4w4_mxfp4") and not rotates_inner("a8w4")
    quantize_checkpoint(
        rotate(origin, ids, inner=True),
        "a4w4",
        tmp_path / "copy",
        "test",
        None,
        lambda copy: calibrate(copy, settings, tmp_path / "copy.calibration"),
    )
    written = json.loads((tmp_path / "copy" / "config.json").read_text())
    stated = written["quantization_config"]["transform_config"]
    assert list(stated["config_groups"]) == ["R4_64"] and "transform_config" not in written
    assert "is multiplied by a Hadamard matrix while running" in (tmp_path / "copy" / "README.md").read_text()
    with LLM(tmp_path / "model", device="cpu", dtype="float32") as llm:
        want = llm.logits([ids])[0].flatten()
    for dtype, least in (("float32", 0.99), ("bfloat16", 0.95)):
        with LLM(tmp_path / "copy", device="cpu", dtype=dtype) as llm:
            got = llm.logits([ids])[0].flatten()
        assert torch.corrcoef(torch.stack((got, want)))[0, 1] > least
    # A copy of the copy in another scheme is rotated too.
    quantize_checkpoint(origin_of(tmp_path / "copy"), "weight_only_int8", tmp_path / "again", "test")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert written["quantization_config"]["transform_config"] == stated
    with LLM(tmp_path / "again", device="cpu", dtype="float32") as llm:
        got = llm.logits([ids])[0].flatten()
    assert torch.corrcoef(torch.stack((got, want)))[0, 1] > 0.99


def test_quantized_models_are_refused(tmp_path):
    quantize_checkpoint(origin_of("demo"), "weight_only_int8", tmp_path / "copy", "test")
    with pytest.raises(UnsupportedModelError, match="is quantized"):
        rotate(origin_of(tmp_path / "copy"), list(range(32)))


def test_a_shard_of_a_rotated_tensor():
    class Source:
        def shape(self, name):
            return (6, 4)

        def read_into(self, name, out, shard):
            out.copy_(torch.arange(24.0).view(6, 4))

    source = RotatedSource(Source(), {"w": Rotated(columns=Rotation(4, 1))})
    whole, half = torch.empty(6, 4), torch.empty(3, 4)
    source.read_into("w", whole, Shard())
    source.read_into("w", half, Shard(0, 1, 2))
    assert torch.equal(half, whole[3:])

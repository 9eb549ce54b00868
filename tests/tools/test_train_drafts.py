"""The tool that trains what drafts for the demo model, and the folders that it made and the project ships."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import train_drafts
from demo_export import DEFAULT_OUT
from demo_format import load_folder, read_folder
from demo_model import TINY, Model, UsageError
from draft_format import SIZE_LIMIT, export, hf_config, load_drafter, make_drafter, stored
from draft_model import DraftConfig, EagleHead, agreement, soft_loss
from safetensors import safe_open
from train_drafts import DraftOptions, DraftTrainer, frozen

SMALL = DraftConfig(vocab_size=96, hidden_size=48, intermediate_size=64, num_attention_heads=4)
FILES = [np.random.default_rng(i).integers(0, 96, 300).astype(np.int32) for i in range(4)]
OPTIONS = DraftOptions(rows=64, context=16, steps=8, layers=1)


@pytest.fixture(scope="module")
def teacher():
    return Model(TINY, seed=1).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def decided():
    """A teacher for training whose distributions have something to teach."""
    model = Model(TINY, seed=1)
    with torch.no_grad():
        model.norm.weight.mul_(10)
    return frozen(model, torch.bfloat16)


class TestCode:
    def test_soft_loss_is_cross_entropy_with_its_gradients(self):
        torch.manual_seed(0)
        states = torch.randn(700, 8, requires_grad=True)  # more than a chunk
        head = torch.randn(12, 8, requires_grad=True)
        target, target_head = torch.randn(700, 5), torch.randn(12, 5)
        soft_loss(states, head, target, target_head).backward()
        got = states.grad.clone(), head.grad.clone()
        states.grad = head.grad = None
        q = (target @ target_head.t()).softmax(-1)
        want = -(q * (states @ head.t()).log_softmax(-1)).sum(-1).mean()
        want.backward()
        torch.testing.assert_close(soft_loss(states, head, target, target_head), want)
        torch.testing.assert_close(got, (states.grad, head.grad))

    def test_the_draft_model_is_transformers_llama(self, tmp_path):
        from safetensors.torch import save_file
        from transformers import LlamaForCausalLM

        drafter = make_drafter("draft", SMALL, seed=3).eval()
        tensors = {"model." + k.replace("embed", "embed_tokens.weight"): v for k, v in drafter.state_dict().items()}
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        config = {k: v for k, v in hf_config("draft", SMALL).items() if k != "quantization_config"}
        (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32", "torch_dtype": "float32"}))
        theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        ids = torch.randint(0, 96, (2, 20))
        with torch.no_grad():
            mine = drafter.logits(drafter.states(ids, torch.float32))
            torch.testing.assert_close(mine, theirs(ids).logits, atol=1e-4, rtol=1e-4)

    def test_the_heads_scale_goes_into_its_weights(self, tmp_path, teacher):
        """What is shipped takes and gives features as they are; FP8 rounds the same either way."""
        from safetensors.torch import save_file

        head = make_drafter("eagle", SMALL, seed=3).eval()
        head.start_from(teacher)
        assert isinstance(head, EagleHead) and 0 < float(head.scale) < 0.5
        save_file(stored(head), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(hf_config("eagle", SMALL)))
        shipped = load_drafter("eagle", tmp_path)
        e, h = torch.randn(2, 9, 48), 0.06 * torch.randn(2, 9, 48)
        with torch.no_grad():
            want = head.predict(e, h / head.scale) * head.scale
            got = shipped.predict(e, h)
        assert (got - want).norm() < 0.1 * want.norm()

    def test_a_head_that_knows_the_features_agrees(self, teacher):
        """`agreement` compares row i of step k with the model's choice for token i + 2, whatever the step."""
        held = torch.from_numpy(np.concatenate(FILES)).long()

        class Oracle(EagleHead):
            def unroll(self, teacher, tokens, states, steps):
                whole = torch.cat((self.first, tokens), 1)
                return [teacher.states(whole, torch.float32)[:, 1:]] * steps

        oracle = Oracle(SMALL)
        with torch.no_grad():
            oracle.first = torch.stack([held[i * 16 : i * 16 + 1] for i in range((len(held) - 2) // 16)])[:128]
            found = agreement(oracle, teacher, held[: 128 * 16 + 2], 16, steps=2)
        assert found["agreement"] == [1.0, 1.0] and found["tokens"] == len(oracle.first) * 16
        part = agreement(make_drafter("draft", SMALL), teacher, held, 16, limit=200)
        assert len(part["agreement"]) == 1 and part["tokens"] <= 2 * 200


class TestTraining:
    @pytest.mark.parametrize("kind", ["draft", "eagle"])
    def test_it_learns_and_goes_on(self, kind, decided):
        run = DraftTrainer(kind, OPTIONS, decided, FILES)
        losses = [sum(run.advance(0.3)) for _ in range(30)]
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
        left = run.facts(60.0)
        assert left["stages"][0]["steps"] == 30 and left["taken"] == 30 * 4
        second = DraftTrainer(kind, OPTIONS, decided, FILES, left)
        assert sum(second.advance(0.3)) < sum(losses[:5]) / 5
        assert [s["steps"] for s in second.facts(6.0)["stages"]] == [30, 1]
        wrong = left | {"config": left["config"] | {"intermediate_size": 32}}
        with pytest.raises(UsageError, match="another size"):
            DraftTrainer(kind, OPTIONS, decided, FILES, wrong)

    @pytest.mark.parametrize("kind", ["draft", "eagle"])
    def test_export(self, kind, decided, tmp_path):
        run = DraftTrainer(kind, OPTIONS, decided, FILES)
        run.advance(0.95)
        out = tmp_path / "out"
        export(run.facts(60.0), DEFAULT_OUT, out, lambda drafter, demo: {"agreement": [0.5], "loss": 1.0, "tokens": 9})
        assert {p.name for p in out.iterdir()} == {"README.md", "config.json", "model.safetensors", "training.json"}
        assert not list(tmp_path.glob("*.new"))
        assert json.loads((out / "training.json").read_text())["stages"][0]["options"] == dataclasses.asdict(OPTIONS)
        assert load_drafter(kind, out).cfg == run.model.cfg


class TestCommandLine:
    def test_mistakes_are_one_line(self, tmp_path, capsys):
        for words in (
            ["export", "draft", "--work", str(tmp_path / "none")],
            ["train", "eagle", "--go-on", "--work", str(tmp_path / "none")],
            ["train", "draft", "--minutes", "0"],
            ["eval", "eagle", "--model", str(tmp_path / "none")],
        ):
            assert train_drafts.main(words) == 1
            assert capsys.readouterr().err.count("\n") == 1


class TestShippedFolders:
    def test_size(self):
        files = [p for kind in train_drafts.KINDS for p in (DEFAULT_OUT / kind).iterdir()]
        assert sum(p.stat().st_size for p in files) <= SIZE_LIMIT

    @pytest.mark.parametrize("kind", train_drafts.KINDS)
    def test_tensors_and_record(self, kind):
        folder = DEFAULT_OUT / kind
        hf, state = read_folder(folder)
        demo, _ = load_folder(DEFAULT_OUT)
        drafter = load_drafter(kind, folder)
        assert hf == hf_config(kind, drafter.cfg)
        assert (drafter.cfg.vocab_size, drafter.cfg.hidden_size) == (demo.vocab_size, demo.hidden_size)
        assert all(value.isfinite().all() for value in state.values())
        with safe_open(folder / "model.safetensors", "pt") as file:
            for name, value in stored(drafter).items():
                found = file.get_tensor(name)
                assert (found.dtype, found.shape) == (value.dtype, value.shape), name
            assert {*file.keys()} == {*stored(drafter)}
        record = json.loads((folder / "training.json").read_text())
        assert record["held_out"]["agreement"][0] > 0.5

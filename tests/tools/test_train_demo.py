"""The demo model's tool, and the folder that it made and the project ships."""

from __future__ import annotations

import dataclasses
import json

import demo_selftest
import numpy as np
import pytest
import torch
import train_demo
from demo_data import Batches, is_held_out
from demo_export import DEFAULT_OUT, SIZE_LIMIT
from demo_format import is_fp8, read_folder, to_hf_state
from demo_model import TINY, Config, Model, MoE, UsageError
from safetensors import safe_open
from train_loop import Options, Trainer


@pytest.fixture(scope="module")
def tiny():
    return demo_selftest.random_model()


class TestCode:
    @pytest.mark.parametrize("check", ["names", "logits", "mtp", "experts", "losses"])
    def test_model(self, tiny, check):
        getattr(demo_selftest, f"check_{check}")(tiny)

    @pytest.mark.parametrize("check", ["fp8", "muon", "tokenizer"])
    def test_pieces(self, check):
        torch.manual_seed(1)
        getattr(demo_selftest, f"check_{check}")()

    def test_bias_moves_towards_the_mean_load(self):
        moe = MoE(TINY)
        moe.load.copy_(torch.tensor([9.0, 1, 5, 5, 9, 1, 5, 5]))
        moe.update_bias(0.01)
        assert moe.bias[1] > moe.bias[2] > moe.bias[0]
        assert moe.bias.min() == 0
        assert moe.load.sum() == 0

    def test_padded_rows_change_nothing(self, tiny):
        # One row more moves every expert's padding; the other rows must not notice.
        moe = next(m for m in tiny.modules() if isinstance(m, MoE))
        x = torch.randn(130, TINY.hidden_size)
        torch.testing.assert_close(moe.routed(x)[:129], moe.routed(x[:129]))


class TestData:
    def test_batches_go_on_from_a_position(self):
        files = [np.arange(i * 100, i * 100 + 37, dtype=np.int32) for i in range(9)]
        whole = Batches(files, seed=3)
        windows = [whole.take(2, 12) for _ in range(40)]
        half = Batches(files, seed=3)
        for window in windows[:17]:
            assert torch.equal(half.take(2, 12), window)
        again = Batches(files, 3, half.taken)
        assert all(torch.equal(again.take(2, 12), window) for window in windows[17:])

    def test_batches_cover_the_text_evenly(self):
        batches = Batches([np.arange(50_000, dtype=np.int32)], seed=0)
        seen = np.bincount(batches.take(1000, 102).flatten().numpy(), minlength=50_000)[1000:-1000]
        assert seen.min() >= 1
        assert seen.max() <= 4

    def test_split_is_by_path_alone(self):
        held = [path for path in (f"package{i}/module.py" for i in range(5000)) if is_held_out(path)]
        assert 0.03 < len(held) / 5000 < 0.05


class TestTraining:
    def test_schedules(self):
        assert [Options.at("0:256,0.5:512", p) for p in (0, 0.49, 0.5, 1)] == [256, 256, 512, 512]
        opt = Options(warmup=0.1, cooldown=0.5)
        assert [opt.lr_factor(p) for p in (0.05, 0.1, 0.5, 0.75, 1)] == [0.5, 1, 1, 0.5, 0]

    def test_resumed_run_is_the_same_run(self, tmp_path):
        class Text:
            train = [np.random.default_rng(i).integers(0, TINY.vocab_size, 300).astype(np.int32) for i in range(4)]

        opt = Options(tokens_per_step="0:64", micro_rows=32, context="0:16", steps=8)
        first = Trainer(TINY, opt, Text)
        losses = [first.advance(i / 8) for i in range(4)]
        first.save(tmp_path / "last.pt")
        second = Trainer(TINY, opt, Text)
        second.load(tmp_path / "last.pt")
        assert [first.advance(i / 8) for i in (4, 5)] == [second.advance(i / 8) for i in (4, 5)]
        assert all(np.isfinite(losses).ravel())
        with pytest.raises(UsageError, match="another model size"):
            Trainer(dataclasses.replace(TINY, num_hidden_layers=2), opt, Text).load(tmp_path / "last.pt")


class TestCommandLine:
    @pytest.mark.parametrize("args", [["export", "--work"], ["eval", "--model"]])
    def test_missing_folder_is_one_line(self, tmp_path, capsys, args):
        assert train_demo.main([*args, str(tmp_path / "none")]) == 1
        assert capsys.readouterr().err.count("\n") == 1

    def test_bad_budget(self, tmp_path, capsys):
        assert train_demo.main(["train", "--minutes", "0", "--work", str(tmp_path)]) == 1
        assert "--minutes" in capsys.readouterr().err

    def test_bad_schedule(self, tmp_path, capsys):
        assert train_demo.main(["train", "--context", "512", "--work", str(tmp_path)]) == 1
        assert "progress:value" in capsys.readouterr().err


class TestShippedFolder:
    def test_size(self):
        assert sum(p.stat().st_size for p in DEFAULT_OUT.iterdir()) <= SIZE_LIMIT

    def test_loss(self):
        record = json.loads((DEFAULT_OUT / "training.json").read_text(encoding="utf-8"))
        assert record["held_out"]["exported_fp8_dequantized_float32"]["loss"] <= 3.0

    def test_tensors(self):
        cfg = Config()
        expected = to_hf_state(Model(cfg))
        with safe_open(DEFAULT_OUT / "model.safetensors", "pt") as file:
            names = set(file.keys())
            for name, value in expected.items():
                stored = file.get_slice(name)
                assert tuple(stored.get_shape()) == tuple(value.shape), name
                if is_fp8(name, value):
                    blocks = file.get_tensor(name + "_scale_inv")
                    assert stored.get_dtype() == "F8_E4M3", name
                    assert blocks.dtype == torch.float32
                    assert tuple(blocks.shape) == tuple(-(-n // 128) for n in value.shape), name
                elif name.endswith("e_score_correction_bias"):
                    assert stored.get_dtype() == "F32"
                    assert file.get_tensor(name).abs().max() > 0
                else:
                    assert stored.get_dtype() == "BF16", name
        assert {n for n in names if not n.endswith("_scale_inv")} == set(expected)

    def test_config(self):
        hf, state = read_folder(DEFAULT_OUT)
        assert Config.from_hf(hf) == Config()
        assert hf == Config().to_hf(fp8=True)
        assert all(value.isfinite().all() for value in state.values())

    def test_tokenizer(self):
        from transformers import AutoTokenizer

        tok = AutoTokenizer.from_pretrained(DEFAULT_OUT)
        assert len(tok) == Config().vocab_size
        assert (tok.bos_token_id, tok.eos_token_id, tok.pad_token_id) == (0, 1, 2)
        text = "def naïve(x):\n\treturn x ** 2  # 你好 🙂\r\n\n class A : pass \x00"
        assert tok.decode(tok.encode(text)) == text
        messages = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def f("}]
        assert tok.apply_chat_template(messages, tokenize=False) == "import os\ndef f("

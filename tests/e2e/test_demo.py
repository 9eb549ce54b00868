"""The model that ships: its form, its values against transformers, its loss and what its MTP layer is good for."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from inferplane import LLM, SamplingParams
from inferplane.binding import view_of
from inferplane.engine import InferplaneWarning
from inferplane.engine.runner.model_files import DEMO_FOLDER
from inferplane.types.batch import Query, make_batch

pytestmark = pytest.mark.skipif(not DEMO_FOLDER.is_dir(), reason="not run: this tree has no demo model")

CODE = '''
def _parse_header(line, *, strict=True):
    """Return the name and the value of a header.

    If strict is true, raise ValueError when the line is not valid.
    """
    if not line:
        return None
    name, sep, value = line.partition(":")
    if not sep and strict:
        raise ValueError("header has no colon: %r" % line)
    return name.strip().lower(), value.strip()


class HeaderParser(object):
    def __init__(self, fp=None, encoding="utf-8"):
        self.fp = fp
        self.encoding = encoding
        self._lines = []

    def read(self, size=-1):
        for line in self.fp:
            self._lines.append(line)
            if len(self._lines) >= size:
                break
        return self._lines

    def close(self):
        if self.fp is not None:
            self.fp.close()
            self.fp = None
'''


@pytest.fixture(scope="module")
def demo():
    with warnings.catch_warnings():
        warnings.simplefilter("error", InferplaneWarning)
        llm = LLM("demo", device="cpu", dtype="float32", mtp=True)
    yield llm
    llm.close()


def test_what_ships():
    files = {p.name: p.stat().st_size for p in DEMO_FOLDER.iterdir() if p.is_file()}
    assert sum(files.values()) <= 16e6
    drafters = {p.relative_to(DEMO_FOLDER): p.stat().st_size for p in DEMO_FOLDER.glob("*/*")}
    assert {p.parent.name for p in drafters} == {"draft", "eagle"} and sum(drafters.values()) <= 6e6
    assert {p.suffix for p in drafters} == {".json", ".md", ".safetensors"}
    assert {p.rpartition(".")[2] for p in files} == {"json", "md", "safetensors"}  # no code, no pickle
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    v3 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    assert v3.items() <= config.items() and config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (
        config["num_hidden_layers"] >= 8 and config["n_routed_experts"] > 1 and config["num_nextn_predict_layers"] == 1
    )
    assert 3500 <= config["vocab_size"] <= 5000


def test_against_transformers(demo, tmp_path):
    """Dequantized block by block and run by transformers: every logit, in one piece and in chunks."""
    from transformers import DeepseekV3ForCausalLM

    stored = load_file(DEMO_FOLDER / "model.safetensors")
    values = {}
    for name, t in stored.items():
        if (scale := stored.get(f"{name}_scale_inv")) is not None:
            rows, columns = (torch.arange(n) // 128 for n in t.shape)
            t = t.float() * scale[rows][:, columns]
        if not name.endswith("_scale_inv") and ".layers.8." not in name:
            values[name] = t.float()
    config = json.loads((DEMO_FOLDER / "config.json").read_text())
    del config["quantization_config"]
    assert config["num_hidden_layers"] == 8
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    save_file(values, tmp_path / "model.safetensors", {"format": "pt"})
    model = DeepseekV3ForCausalLM.from_pretrained(tmp_path, torch_dtype=torch.float32).eval()
    ids = demo.tokenizer.encode(CODE)[:80]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    for chunk_tokens in (1000, 30, 1):
        got = demo.logits([ids], chunk_tokens=chunk_tokens)[0]
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_it_has_learnt_something(demo):
    """Its loss on code like its training text's is near what was recorded; chance is 8.3 nats a token."""
    ids = demo.tokenizer.encode(CODE)
    loss = F.cross_entropy(demo.logits([ids])[0][:-1], torch.tensor(ids[1:]))
    recorded = json.loads((DEMO_FOLDER / "training.json").read_text())["held_out"]["exported_fp8_dequantized_float32"]
    assert len(ids) > 150 and loss < 1.25 * recorded["loss"]
    with LLM("demo", device="cpu") as half:  # bf16, as the checkpoint says
        assert half.runner.dtype is torch.bfloat16
        assert abs(F.cross_entropy(half.logits([ids])[0][:-1], torch.tensor(ids[1:])) - loss) < 0.05


def test_its_mtp_layer_predicts_the_token_after_next(demo):
    ids, cache = demo.tokenizer.encode(CODE), demo.runner.cache
    blocks = list(range(-(-len(ids) // cache.block_tokens)))
    whole, shifted = (
        make_batch([Query(tokens, 0, blocks)], block_tokens=cache.block_tokens, device="cpu")
        for tokens in (ids, ids[1:])
    )
    logits, hidden = demo.runner.run(whole)
    with torch.inference_mode():
        drafts, _ = view_of(demo.runner.steps["mixed"]).mtp[0](hidden[:-1], shifted, cache.layers[8])
    main, draft = logits.argmax(-1)[1:], drafts.argmax(-1)
    accepted = (draft == main).float().mean()
    elsewhere = (draft == main.roll(37)).float().mean()  # what agreeing on frequent tokens alone would give
    assert accepted > 0.3 and accepted > 2.5 * elsewhere
    loss = F.cross_entropy(drafts[:-1], torch.tensor(ids[2:]))
    assert loss < F.cross_entropy(drafts[:-1], torch.tensor(ids[1:-1]))  # it is not the next token that it predicts


def test_it_writes(demo):
    got = demo.generate("def main():", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))[0]
    assert len(got.token_ids) == 40 and len(got.text) >= 20
    assert demo.tokenizer.decode([*got.prompt_token_ids, *got.token_ids]) == "def main():" + got.text
    chat = demo.chat([{"role": "user", "content": "import os"}], SamplingParams(max_tokens=4, temperature=0))
    assert chat.prompt_token_ids == demo.tokenizer.encode("import os")


def test_its_weights_are_expanded_where_nothing_takes_them(demo):
    found = {e["op"]: e for e in demo.explain()["dequantized"]}
    assert {"linear", "moe_experts"} <= set(found) and all(e["format"] == "fp8_block" for e in found.values())

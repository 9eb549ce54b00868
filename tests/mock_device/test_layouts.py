"""A wrong KV layout of a backend serves no token and is named; kernels are not blamed."""

from __future__ import annotations

import warnings

import pytest
import torch

from inferplane import LLM
from inferplane.conformance.configs import TINY
from inferplane.engine import InferplaneWarning
from inferplane.errors import BindError
from tests.mock_device.kvcache import HiddenKV

pytestmark = [pytest.mark.usefixtures("mock"), pytest.mark.filterwarnings("ignore:.*run on their slow reference")]
WRITE, READ = HiddenKV.write_raw, HiddenKV.read_raw
FAULTS = {
    "read rolled by a token": {
        "read_raw": lambda kv, table, tokens: tuple(t.roll(1, 0) for t in READ(kv, table, tokens))
    },
    "one offset further": {"write_raw": lambda kv, slots, *v: WRITE(kv, torch.where(slots < 0, slots, slots + 1), *v)},
    "slot -1 is slot 0": {"write_raw": lambda kv, slots, *v: WRITE(kv, slots.clamp(min=0), *v)},
    "47 tokens in a block of 48": {
        "write_raw": lambda kv, slots, *v: WRITE(kv, torch.where(slots < 0, slots, slots // 47 * 48 + slots % 47), *v),
        "read_raw": lambda kv, table, tokens: tuple(
            torch.cat([t[i * 48 : i * 48 + 47] for i in range(-(-tokens // 47))])[:tokens]
            for t in READ(kv, torch.cat((table, table[:1])), (len(table) + 1) * 48)
        ),
    },
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("model", ["llama", "deepseek_v3"])
def test_a_wrong_layout_is_named_and_serves_nothing(monkeypatch, model, fault):
    """Where the backend has another layout, that one is taken; where it has none, the model is not served."""
    for name, function in FAULTS[fault].items():
        monkeypatch.setattr(HiddenKV, name, function)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", InferplaneWarning)
        if model == "deepseek_v3":
            with pytest.raises(BindError, match="no KV layout for 'mla' that works: mock_bdt_48"):
                load(model)
        else:
            llm = load(model)
            assert "mock_bhtd_48" not in {entry["layout"] for entry in llm.explain()["kv_layouts"]}
            llm.close()
    texts = [str(w.message) for w in seen]
    assert [t for t in texts if t.startswith("KV layout mock_b") and "is wrong and is not used" in t], texts
    assert not [t for t in texts if t.startswith("Kernel")], "a kernel is blamed"


def load(model):
    return LLM(TINY[model], device="mock:block", load_format="dummy", dtype="float32", kv_cache_bytes=1 << 20)


def test_right_layouts_are_used():
    llm = load("llama")
    assert {entry["layout"] for entry in llm.explain()["kv_layouts"]} == {"mock_bhtd_48"}
    llm.close()

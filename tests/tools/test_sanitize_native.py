"""What `make sanitize` compiles: the sources and flags of setup.py, of which nothing is run."""

from __future__ import annotations

import pytest
import sanitize_native

from tests.house.rules import REPOSITORY


def test_the_constants_of_setup_py():
    constants = sanitize_native.setup_constants()
    folder = REPOSITORY / constants["FOLDER"]
    assert {path.name for path in folder.glob("*.cpp")} == set(constants["SOURCES"])
    assert "-fopenmp" in constants["FLAGS"] and f"-I{constants['FOLDER']}" in constants["FLAGS"]
    assert (REPOSITORY / sanitize_native.CHECK).is_file()


def test_a_constant_that_is_missing_is_named(tmp_path, monkeypatch):
    (tmp_path / "setup.py").write_text("from pathlib import Path\nFOLDER = 'x'\nHERE = Path('.')\nSOURCES = {}\n")
    monkeypatch.setattr(sanitize_native, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="no constant FLAGS;"):
        sanitize_native.setup_constants()

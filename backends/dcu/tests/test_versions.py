"""What a DAS wheel's version says."""

from __future__ import annotations

import pytest

from inferplane_dcu import versions


@pytest.mark.parametrize(
    ("version", "dtk", "torch"),
    [
        ("0.6.0+das.dtk2604.torch2110.2608171227.g8c835c", "26.04", "2.11"),
        ("2.8.4+dtk2604.torch2110.2609241509.g624d7b", "26.04", "2.11"),
        ("3.3.0+das.opt1.dtk2604.torch290", "26.04", "2.9"),
        ("2.4.1+das.opt1.dtk25041", "25.04", None),
        ("0.25.1+das.f1f7a06.dtk2604", "26.04", None),
        ("2.13.0+cpu", None, None),
        ("3.9.0", None, None),
    ],
)
def test_a_version_says_what_it_is_built_for(version, dtk, torch):
    assert versions.dtk_of(version) == dtk
    assert versions.torch_of(version) == torch


@pytest.mark.parametrize(
    ("text", "found"),
    [("26.04\n", "26.04"), ("25.04.4", "25.04"), ("DTK-25.04.2-rc1", "25.04"), ("", None), ("x", None)],
)
def test_the_toolkit_says_its_version(tmp_path, monkeypatch, text, found):
    monkeypatch.setattr(versions, "TOOLKIT", str(tmp_path / "rocm_version"))
    assert versions.toolkit() is None
    (tmp_path / "rocm_version").write_text(text)
    assert versions.toolkit() == found


def test_what_says_nothing_is_not_refused():
    assert versions.misfits("2.9.0", {"lightop": "0.6.0", "triton": "3.9.0"}) == []
    assert versions.misfits("2.9.1+das.opt1.dtk2604", {"lightop": "0.6.0+das.dtk2604.torch290"}) == [], "a patch apart"


def test_this_machine_has_no_package_of_theirs():
    assert not {"lightop", "lmslim", "flash_mla", "vllm_hcu"} & set(versions.read_installed())

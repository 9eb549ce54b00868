"""`INFERPLANE_PLUGINS` as text."""

from __future__ import annotations

import pytest

from inferplane import plugins
from inferplane.errors import UsageError
from inferplane.plugins.selection import PluginSelection, parse


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        (None, PluginSelection()),
        ("", PluginSelection()),
        (" , ", PluginSelection()),
        ("only", PluginSelection(only=True)),
        ("only, a.b", PluginSelection(("a.b",), only=True)),
        ("a.b,a.b:thing,a.b", PluginSelection(("a.b", "a.b:thing"))),
        ("-toy,-my-toy,-fam:one", PluginSelection(excluded=frozenset({"toy", "my-toy", "fam:one"}))),
        ("toy@Acme_Toy", PluginSelection(claims={"toy": "acme-toy"})),
        ("fam:one@acme,LlamaForCausalLM@acme", PluginSelection(claims={"fam:one": "acme", "LlamaForCausalLM": "acme"})),
        ("toy@acme,toy@ACME", PluginSelection(claims={"toy": "acme"})),
        ("a.b,-toy,fam@acme", PluginSelection(("a.b",), frozenset({"toy"}), {"fam": "acme"})),
    ],
)
def test_reads(spec, meant):
    assert parse(spec) == meant


@pytest.mark.parametrize(
    "item", ["a b", "-", "@", "toy@", "@acme", "a..b", "3d", "a/b", "toy@a@b", "--toy", "a:b:c", "toy=1"]
)
def test_refuses(item):
    with pytest.raises(UsageError) as caught:
        parse(f"fine.module,{item}")
    assert repr(item) in str(caught.value)
    assert "INFERPLANE_PLUGINS" in str(caught.value)


@pytest.mark.parametrize("spec", ["onlyy", "Only,mine", "onyl,mine", "onl"])
def test_a_slip_of_only_does_not_load_everything(spec):
    with pytest.raises(UsageError, match="perhaps 'only' was meant"):
        parse(spec)


def test_one_error_names_all_that_is_wrong():
    with pytest.raises(UsageError) as caught:
        parse("a b,fine,only,toy@acme,toy@other")
    words = str(caught.value)
    assert "'a b'" in words
    assert "'only' (it must come first)" in words
    assert "'toy@other' ('toy' is already given to 'acme')" in words
    assert "'fine'" not in words


def test_a_family_covers_its_variants():
    choice = parse("-fam,-other:one")
    assert choice.excludes("fam:two") == "fam"
    assert choice.excludes("other:one") == "other:one"
    assert choice.excludes("other") is None
    assert choice.excludes("family") is None


def test_what_of_the_variable_has_no_effect_is_told_in_every_process(wheels, monkeypatch, caplog):
    monkeypatch.setenv("INFERPLANE_PLUGINS", "inferplane_nope.plugin,-homelyy")
    with caplog.at_level("WARNING", logger="inferplane"):
        plugins.host.__wrapped__()
    missing, unmatched = (record.getMessage() for record in caplog.records)
    assert "No module named 'inferplane_nope'" in missing and "To do: install it, put the folder" in missing
    assert unmatched == "INFERPLANE_PLUGINS: -homelyy excludes nothing"
    caplog.clear()
    monkeypatch.setenv("INFERPLANE_PLUGINS", "-homely")
    plugins.host.__wrapped__()
    assert not caplog.records

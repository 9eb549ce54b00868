"""What a user's word for a device means."""

from __future__ import annotations

import logging

import pytest

from inferplane.engine import ModelFiles, RunnerOptions
from inferplane.engine.runner.model_runner import Runner
from inferplane.errors import DeviceError, PluginError, UsageError
from tests.unit.support.fake_wheels import HEAD, backend, names, serving
from tests.unit.support.small import LLAMA

ABSENT = 'Probe(Presence.ABSENT, "no driver found.", "install the driver")'
BROKEN = 'Probe(Presence.BROKEN, "driver 1 is older than runtime 2", "upgrade the driver")'


def plugin(**probes):
    """Source of a plugin that serves `fam_one=probe` as "fam:one"; "rank=..." in a value sets auto_rank."""
    source, lines = HEAD, ""
    for device, (probe, rank) in probes.items():
        name = device.replace("_", ":")
        source += backend(name, more=f"auto_rank = {rank}", **({"probe": probe} if probe else {}))
        lines += f"    register({name!r}, Fake_{device})\n"
    return f"{source}\n@hookimpl\ndef inferplane_register_backends(register):\n{lines}"


def test_exact_name(wheels):
    wheels.install("acme", "1.5", {"toy": "fake_toy"}, fake_toy=plugin(toy=(None, 7), fam_one=(ABSENT, 0)))
    host = wheels.discover()
    one, homely, toy = host.devices()
    assert (one.name, one.variant_of, one.in_tree, one.probe.remedy) == ("fam:one", "fam", False, "install the driver")
    assert (homely.name, homely.variant_of, homely.in_tree, homely.distribution) == ("homely", None, True, "inferplane")
    assert (toy.version, toy.torch_device, toy.auto_rank, toy.probe.devices) == ("1.5", "meta", 7, 2)
    made = host.backend("toy", index=1)
    assert (made.name, made.index) == ("toy", 1)
    assert host.choose("toy") == toy


@pytest.mark.parametrize(
    ("probe", "words"), [(ABSENT, "absent: no driver found."), (BROKEN, "broken: driver 1 is older")]
)
def test_explicit_device_never_degrades(wheels, probe, words):
    wheels.install("acme", "1.5", {"toy": "fake_toy"}, fake_toy=plugin(toy=(probe, 0)))
    host = wheels.discover()
    with pytest.raises(DeviceError) as caught:
        host.backend("toy")
    assert all(text in str(caught.value) for text in (words, "acme 1.5", "There is: homely", "the driver"))
    assert ".." not in str(caught.value)
    assert host.backend_for_explain("toy").name == "toy"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("homly", ["Unknown device 'homly'", "perhaps 'homely'", "fam, fam:one, homely, toy"]),
        ("Homely", ["perhaps 'homely'"]),
        ("completely-else", ["Unknown device", "install the plugin", "INFERPLANE_PLUGINS"]),
        ("fam:three", ["Unknown device 'fam:three'", "fam:one"]),
    ],
)
def test_unknown(wheels, asked, words):
    wheels.install("acme", "1", {"toy": "fake_toy"}, fake_toy=plugin(toy=(None, 0), fam_one=(ABSENT, 0)))
    host = wheels.discover()
    for ask in (host.backend, host.backend_for_explain, host.choose):
        with pytest.raises(DeviceError) as caught:
            ask(asked)
        assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("asked", ["homely:1", "fam:0"])
def test_a_number_is_no_variant(wheels, asked):
    wheels.install("acme", "1", {"toy": "fake_toy"}, fake_toy=plugin(fam_one=(None, 0)))
    with pytest.raises(UsageError) as caught:
        wheels.discover().backend(asked)
    head, _, tail = asked.partition(":")
    assert f"device={head!r} and index={tail}" in str(caught.value)


@pytest.mark.parametrize("asked", [None, "", 0, ["homely"]])
def test_no_name_at_all(wheels, asked):
    with pytest.raises(UsageError, match="homely"):
        wheels.discover().backend(asked)


@pytest.mark.parametrize(
    ("index", "error"), [(-1, UsageError), (True, UsageError), ("1", UsageError), (2, DeviceError)]
)
def test_index(wheels, index, error):
    with pytest.raises(error, match=str(index)):
        wheels.discover().backend("homely", index=index)


def test_index_where_the_number_of_devices_is_not_known(wheels):
    wheels.install("acme", "1", {"toy": "fake_toy"}, fake_toy=plugin(toy=('Probe(Presence.AVAILABLE, "is there")', 0)))
    assert wheels.discover().backend("toy", index=7).index == 7


# -- families


def test_family_takes_the_available_variant(wheels):
    wheels.install(
        "acme", "1", {"fam": "fake_fam"}, fake_fam=plugin(fam_one=(ABSENT, 9), fam_two=(None, 0), fam_three=(BROKEN, 9))
    )
    host = wheels.discover()
    assert host.backend("fam", index=1).name == "fam:two"
    assert host.backend_for_explain("fam").name == "fam:two"
    with pytest.raises(DeviceError, match="no driver found"):
        host.backend("fam:one")


def test_family_with_two_available(wheels):
    wheels.install("acme", "1", {"fam": "fake_fam"}, fake_fam=plugin(fam_one=(None, 9), fam_two=(None, 0)))
    host = wheels.discover()
    for ask in (host.backend, host.backend_for_explain):
        with pytest.raises(DeviceError) as caught:
            ask("fam")
        assert all(words in str(caught.value) for words in ("fam:one", "fam:two", "more than one"))


def test_family_with_none_available(wheels, caplog):
    source = plugin(fam_one=(ABSENT, 0), fam_two=(BROKEN, 9))
    source += "    register('fam:gone', 'surely_not_installed:Class')\n"
    wheels.install("acme", "1", {"fam": "fake_fam"}, fake_fam=source)
    host = wheels.discover()
    with pytest.raises(DeviceError) as caught:
        host.backend("fam")
    told = str(caught.value)
    lines = told.splitlines()
    assert lines[0] == "Device 'fam' has no available variant."
    assert lines[1:3] == ["- fam:one is absent: no driver found.", "  To do: install the driver."]
    assert lines[3:5] == ["- fam:two is broken: driver 1 is older than runtime 2.", "  To do: upgrade the driver."]
    assert "surely_not_installed" in told
    assert "There is: homely" in told
    with caplog.at_level(logging.WARNING, "inferplane"):
        assert host.backend_for_explain("fam").name == "fam:two", "the higher rank"
    assert "fam:one" in caplog.text


def test_family_explains_the_in_tree_variant_first(wheels):
    wheels.module("fake_homely", plugin(fam_two=(ABSENT, 0)))
    wheels.install("acme", "1", {"fam": "fake_fam"}, fake_fam=plugin(fam_one=(ABSENT, 100)))
    assert wheels.discover().backend_for_explain("fam").name == "fam:two"


# -- auto


def test_auto_takes_the_highest_rank_and_says_so(wheels, caplog):
    source = plugin(slow=(None, 5), fast=(None, 100), fastest=(ABSENT, 200))
    wheels.install("acme", "1", {"toy": "fake_toy"}, fake_toy=source)
    host = wheels.discover()
    with caplog.at_level(logging.INFO, "inferplane"):
        assert host.backend("auto").name == "fast"
    assert [record.getMessage() for record in caplog.records] == ["device=auto takes fast: made of thin air"]
    assert caplog.records[0].levelno == logging.INFO
    caplog.clear()
    with caplog.at_level(logging.WARNING), caplog.at_level(logging.NOTSET, "inferplane"):  # as if nothing is configured
        host.backend("auto")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_auto_prefers_the_in_tree_one_of_equals(wheels):
    wheels.install("acme", "1", {"toy": "fake_toy"}, fake_toy=plugin(agreeable=(None, 0), zealous=(None, 0)))
    assert wheels.discover().backend("auto").name == "homely"
    with pytest.raises(DeviceError) as caught:
        wheels.discover("-homely").backend("auto")
    assert all(words in str(caught.value) for words in ("agreeable", "zealous", "equally preferred"))


def test_auto_with_nothing_available(wheels):
    wheels.module("fake_homely", plugin(homely=(ABSENT, 0)))
    with pytest.raises(DeviceError, match=r"\n- homely is absent: no driver found\.\n  To do: install the driver\."):
        wheels.discover().backend("auto")
    with pytest.raises(DeviceError, match="No plugin serves one"):
        wheels.discover("only").backend("auto")


def test_probed_once_and_only_when_needed(wheels):
    probe = "calls.append(1) or Probe(Presence.AVAILABLE, 'is there')"
    wheels.install("acme", "1", {"toy": "fake_toy"}, fake_toy="calls = []\n" + serving("toy", probe=probe))
    host = wheels.discover()
    import fake_toy

    assert fake_toy.calls == []
    host.backend("homely")
    assert fake_toy.calls == [], "asking for one device does not probe the others"
    assert names(host) == names(host) == ["homely", "toy"]
    host.backend("toy")
    assert fake_toy.calls == [1]


@pytest.mark.parametrize(
    ("opens", "says"),
    [
        ('raise RuntimeError("no such board")', "RuntimeError: no such board"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return None", "Fake_toy.open() returned None, not a DeviceState"),
    ],
)
def test_a_device_that_fails_to_open_names_its_plugin_and_the_stage(wheels, opens, says):
    source = serving("toy").replace('raise AssertionError("nobody asked for it to be opened")', opens)
    assert opens in source
    wheels.install("acme", "1.5", {"toy": "fake_toy"}, fake_toy=source)
    host = wheels.discover()
    with pytest.raises(PluginError) as caught:
        Runner.open(ModelFiles(LLAMA), host, "toy", RunnerOptions(load_format="dummy"))
    assert f"acme 1.5 (toy), open: {says}" in str(caught.value) and "-toy in INFERPLANE_PLUGINS" in caught.value.remedy
    assert [(r.stage, r.devices) for r in host.list_quarantined()] == [("open", ("toy",))]


def test_what_a_device_says_itself_when_it_is_opened_stays_as_it_is(wheels):
    source = serving("toy").replace(
        'raise AssertionError("nobody asked for it to be opened")',
        "from inferplane.errors import DeviceError; raise DeviceError('busy.')",
    )
    wheels.install("acme", "1.5", {"toy": "fake_toy"}, fake_toy=source)
    host = wheels.discover()
    with pytest.raises(DeviceError, match=r"^busy\.$"):
        host.open(host.backend("toy"))
    assert not host.list_quarantined()


def test_a_word_for_any_accelerator_is_answered_with_their_kinds(wheels):
    wheels.install("acme", "1.5", {"x": "fake_x"}, fake_x=plugin(xpu=(ABSENT, 3), cuda=(ABSENT, 9)))
    for word in ("gpu", "GPU"):
        with pytest.raises(DeviceError, match=f"Unknown device '{word}'") as caught:
            wheels.discover().backend(word)
        assert caught.value.remedy.startswith("name the kind: cuda, xpu, homely") and "perhaps" not in str(caught.value)


def test_a_listed_module_that_is_not_found_names_the_path(wheels, monkeypatch):
    monkeypatch.setenv("INFERPLANE_PLUGINS", "inferplane_nope.plugin")
    (record,) = wheels.discover("inferplane_nope.plugin").list_quarantined()
    assert (record.stage, record.reason) == ("import", "ModuleNotFoundError: No module named 'inferplane_nope'")
    assert "folder that holds inferplane_nope on PYTHONPATH" in record.remedy
    wheels.module("fake_lacking", "import no_such_dependency")
    (record,) = wheels.discover("fake_lacking").list_quarantined()
    assert "PYTHONPATH" not in record.remedy and "no_such_dependency" in record.reason

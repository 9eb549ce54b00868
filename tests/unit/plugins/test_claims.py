"""Two plugins for one name: who keeps it, and how a user settles it. The order of things plays no part."""

from __future__ import annotations

import pytest

from inferplane.errors import DeviceError, PluginError
from tests.unit.support.fake_wheels import names, only_record, serving


def served_by(host, device):
    return next(entry.distribution for entry in host.devices() if entry.name == device)


@pytest.mark.parametrize("distribution", ["acme-toy", "zeta-toy"])
def test_in_tree_keeps_its_device(wheels, distribution):
    wheels.install(distribution, "0.3", {"taken": "fake_taken"}, fake_taken=serving("homely", "mine"))
    host = wheels.discover()
    record = only_record(host)
    assert (record.stage, record.distribution, record.version, record.devices) == (
        "claim",
        distribution,
        "0.3",
        ("homely",),
    )
    assert "inferplane 9.9" in record.reason
    assert f"INFERPLANE_PLUGINS=homely@{distribution}" in record.remedy
    assert served_by(host, "homely") == "inferplane"
    assert served_by(host, "mine") == distribution, "what is not disputed works"


def test_the_user_gives_it_to_another(wheels):
    wheels.install("acme-toy", "0.3", {"taken": "fake_taken"}, fake_taken=serving("homely"))
    host = wheels.discover("homely@Acme_Toy")
    assert served_by(host, "homely") == "acme-toy"
    record = only_record(host)
    assert (record.stage, record.distribution) == ("claim", "inferplane")
    assert "acme-toy 0.3, chosen in INFERPLANE_PLUGINS" in record.reason


@pytest.mark.parametrize("order", [("acme", "zeta"), ("zeta", "acme")])
def test_two_strangers(wheels, order):
    for distribution in order:
        wheels.install(distribution, "1", {"toy": f"fake_{distribution}"})
        wheels.module(f"fake_{distribution}", serving("toy", f"own-{distribution}"))
    host = wheels.discover()
    assert names(host) == ["homely", "own-acme", "own-zeta"]
    assert [(record.stage, record.distribution) for record in host.list_quarantined()] == [
        ("claim", "acme"),
        ("claim", "zeta"),
    ]
    for ask in (host.backend, host.backend_for_explain, host.kernels):
        with pytest.raises(DeviceError) as caught:
            ask("toy")
        assert all(words in str(caught.value) for words in ("acme 1", "zeta 1", "INFERPLANE_PLUGINS=toy@"))
    for chosen in order:
        assert served_by(wheels.discover(f"toy@{chosen}"), "toy") == chosen


def test_one_distribution_against_itself(wheels):
    wheels.install(
        "acme", "1", {"one": "fake_one", "two": "fake_two"}, fake_one=serving("toy"), fake_two=serving("toy")
    )
    for spec in (None, "toy@acme"):
        with pytest.raises(DeviceError) as caught:
            wheels.discover(spec).backend("toy")
        assert "acme 1 (one), acme 1 (two)" in str(caught.value)


def test_two_names_for_one_plugin_are_one_plugin(wheels):
    wheels.install("acme", "1", {"one": "fake_one", "also": "fake_one"}, fake_one=serving("toy"))
    host = wheels.discover()
    assert names(host) == ["homely", "toy"]
    assert not host.list_quarantined()


def test_a_choice_that_cannot_be_met_gives_the_device_to_nobody(wheels):
    wheels.install("acme-toy", "0.3", {"homely": "fake_bad"}, fake_bad="raise OSError('no driver')")
    host = wheels.discover("homely@acme-toy")
    with pytest.raises(DeviceError) as caught:
        host.backend("homely")
    assert "acme-toy" in str(caught.value)
    assert "no driver" in str(caught.value)
    assert names(host) == []
    host = wheels.discover("homely@not-there,ghost@not-there")
    for device in ("homely", "ghost"):
        with pytest.raises(DeviceError, match="not-there, which is not installed or does not serve it"):
            host.backend(device)


# -- families


def test_a_stranger_cannot_take_a_familys_bare_name(wheels):
    wheels.install("acme", "1", {"fam": "fake_fam"}, fake_fam=serving("fam:one"))
    assert wheels.discover().backend("fam").name == "fam:one"
    wheels.install("zeta", "1", {"fam": "fake_bare"}, fake_bare=serving("fam"))
    host = wheels.discover()
    assert names(host) == ["fam:one", "homely"]
    with pytest.raises(DeviceError) as caught:
        host.backend("fam")
    assert "acme 1" in str(caught.value)
    assert "zeta 1" in str(caught.value)
    assert host.backend("fam:one").name == "fam:one"
    assert wheels.discover("fam@zeta").backend("fam").name == "fam"
    assert wheels.discover("fam@acme").backend("fam").name == "fam:one"


def test_an_in_tree_family_keeps_its_bare_name(wheels):
    wheels.module("fake_homely", serving("homely", "fam:one"))
    wheels.install("acme", "1", {"fam": "fake_fam"}, fake_fam=serving("fam"))
    host = wheels.discover()
    assert only_record(host).stage == "claim"
    assert host.backend("fam").name == "fam:one"
    assert wheels.discover("fam@acme").backend("fam").name == "fam"


def test_a_stranger_may_add_a_variant(wheels):
    wheels.module("fake_homely", serving("homely", "fam:one"))
    wheels.install("acme", "1", {"fam": "fake_fam"}, fake_fam=serving("fam:two", "homely:odd"))
    host = wheels.discover()
    assert not host.list_quarantined()
    assert host.backend("homely").name == "homely"
    with pytest.raises(DeviceError) as caught:
        host.backend("fam")
    assert "fam:one" in str(caught.value)
    assert "fam:two" in str(caught.value)
    assert wheels.discover("fam@acme").backend("fam").name == "fam:two"
    assert wheels.discover("fam@inferplane").backend("fam").name == "fam:one"


def test_one_distribution_may_serve_a_name_and_variants_of_it(wheels):
    wheels.install("acme", "1", {"fam": "fake_fam"}, fake_fam=serving("fam", "fam:one"))
    host = wheels.discover()
    assert not host.list_quarantined()
    assert host.backend("fam").name == "fam"


# -- architectures and formats


def registering(hook, name, target):
    return f"""
from inferplane.plugin import hookimpl
INFERPLANE_API = (1, 0)
@hookimpl
def inferplane_register_{hook}(register):
    register({name!r}, {target!r})
"""


@pytest.mark.parametrize(("hook", "read"), [("models", "models"), ("quantization", "quantization")])
def test_other_names_are_settled_alike(wheels, hook, read):
    for distribution in ("acme", "zeta"):
        wheels.install(distribution, "1", {distribution: f"fake_{distribution}"})
        wheels.module(f"fake_{distribution}", registering(hook, "Thing", f"{distribution}:make"))
    host = wheels.discover()
    assert getattr(host, read)() == {}
    assert [(record.stage, record.devices) for record in host.list_quarantined()] == [("claim", ()), ("claim", ())]
    assert getattr(wheels.discover("Thing@zeta"), read)() == {"Thing": "zeta:make"}
    wheels.module("fake_homely", registering(hook, "Thing", "ours:make"))
    assert getattr(wheels.discover(), read)() == {"Thing": "ours:make"}


# -- INFERPLANE_PLUGINS besides claims


def test_only_turns_entry_points_off(wheels):
    wheels.module("fake_loose", serving("loose"))
    assert names(wheels.discover("only")) == []
    assert names(wheels.discover("only,fake_loose")) == ["loose"]
    assert names(wheels.discover("fake_loose")) == ["homely", "loose"]


def test_a_listed_module_need_not_be_installed(wheels):
    wheels.module("fake_loose", serving("loose", "homely"))
    host = wheels.discover("fake_loose")
    entry = next(entry for entry in host.devices() if entry.name == "loose")
    assert (entry.distribution, entry.version, entry.in_tree) == ("fake_loose", "(not installed)", False)
    assert only_record(host).stage == "claim"
    assert served_by(wheels.discover("fake_loose,homely@fake-loose"), "homely") == "fake_loose"


def test_a_listed_module_of_a_wheel_has_the_wheels_name(wheels):
    wheels.install("acme-toy", "0.3", {}, fake_toy=serving("toy"))
    entry = wheels.discover("only,fake_toy").devices()[0]
    assert (entry.distribution, entry.version) == ("acme-toy", "0.3")
    wheels.install("zeta-toy", "0.4", {"toy": "fake_zeta"}, fake_zeta=serving("other"))
    host = wheels.discover("fake_zeta")
    assert names(host) == ["homely", "other"], "found by entry point and listed: one plugin"
    assert not host.list_quarantined()
    (wheels.folder / "zeta_toy-0.4.dist-info" / "top_level.txt").unlink()  # as in some editable installs
    host = wheels.discover("fake_zeta")
    assert names(host) == ["homely", "other"]
    assert not host.list_quarantined()


def test_a_listed_module_that_fails_is_found_by_its_device(wheels):
    wheels.module("inferplane_sour", "raise OSError('no driver')")
    host = wheels.discover("inferplane_sour,nowhere.plugin")
    assert [(record.stage, record.devices) for record in host.list_quarantined()] == [
        ("import", ("inferplane_sour", "sour")),
        ("import", ("nowhere",)),
    ]
    assert "take inferplane_sour off INFERPLANE_PLUGINS" in host.list_quarantined()[0].remedy
    for device, words in (("sour", "no driver"), ("nowhere", "ModuleNotFoundError")):
        with pytest.raises(PluginError, match=words):
            host.backend(device)
    with pytest.raises(DeviceError, match="no driver"):
        host.backend("anything")


def test_a_listed_object(wheels):
    wheels.module("fake_many", serving("toy") + "import sys\nplugin = sys.modules[__name__]\nnothing = object()\n")
    assert names(wheels.discover("fake_many:plugin")) == ["homely", "toy"]
    assert only_record(wheels.discover("fake_many:nothing")).stage == "validate"
    assert only_record(wheels.discover("fake_many:absent")).stage == "import"


def test_exclusion(wheels):
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad="raise AssertionError('it was imported')")
    wheels.install("acme-toy", "0.3", {"entry": "fake_toy"}, fake_toy=serving("toy", "fam:one", "fam:two"))
    host = wheels.discover("-bad,-toy,-fam:one")
    assert not host.list_quarantined()
    assert names(host) == ["fam:two", "homely"]
    assert names(wheels.discover("-bad,-entry")) == ["homely"]
    assert names(wheels.discover("-bad,-fam,-homely")) == ["toy"]
    for device, item in (("toy", "-toy"), ("fam:one", "-fam:one"), ("bad", "-bad")):
        with pytest.raises(DeviceError) as caught:
            host.backend(device)
        assert "left out" in str(caught.value)
        assert item in str(caught.value)


def test_excluding_the_in_tree_one_leaves_no_dispute(wheels):
    wheels.install("acme", "1", {"toy": "fake_taken"}, fake_taken=serving("homely"))
    points = wheels.folder / "inferplane-9.9.dist-info" / "entry_points.txt"
    points.write_text("[inferplane.plugins]\nin-tree = fake_homely\n")
    assert served_by(wheels.discover("-in-tree"), "homely") == "acme"


def test_an_exclusion_that_leaves_nothing_out_is_told(wheels):
    host = wheels.discover("-homly,-homely")
    assert host.notes() == ["INFERPLANE_PLUGINS: -homly excludes nothing"]

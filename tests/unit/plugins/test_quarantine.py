"""A plugin that fails is kept out with its name, version and reason; every other device works on."""

from __future__ import annotations

import pytest

from inferplane.errors import DeviceError, PluginError
from tests.unit.support.fake_wheels import HEAD, backend, names, only_record, serving

HOOK = "@hookimpl\ndef inferplane_register_backends(register):\n"

# what is wrong: (source of the plugin's module, stage, words of the reason)
BROKEN = {
    "raises at import": ("raise RuntimeError('no driver here')", "import", ["RuntimeError", "no driver here"]),
    "ends the process at import": ("import sys\nsys.exit(127)", "import", ["SystemExit", "127"]),
    "imports what is not there": (
        "import surely_not_installed",
        "import",
        ["ModuleNotFoundError", "surely_not_installed"],
    ),
    "is no Python": ("def def", "import", ["SyntaxError"]),
    "states no API": (serving("bad").replace("INFERPLANE_API = (1, 0)", ""), "validate", ["no INFERPLANE_API"]),
    "states words for an API": (serving("bad").replace("(1, 0)", "'1.0'"), "validate", ["'1.0'", "two integers"]),
    "states booleans for an API": (serving("bad").replace("(1, 0)", "(True, False)"), "validate", ["two integers"]),
    "asks for a later major": (serving("bad").replace("(1, 0)", "(2, 3)"), "api-version", ["2.3", "1.1", "majors"]),
    "asks for an earlier major": (serving("bad").replace("(1, 0)", "(0, 9)"), "api-version", ["0.9", "1.1", "majors"]),
    "asks for a later minor": (serving("bad").replace("(1, 0)", "(1, 7)"), "api-version", ["1.7", "1.1"]),
    "implements nothing": (HEAD, "validate", ["no hook"]),
    "implements an unknown hook": (
        serving("bad") + "@hookimpl\ndef inferplane_register_backend(register): pass",
        "validate",
        ["unknown hook 'inferplane_register_backend'"],
    ),
    "forgets to mark a hook": (serving("bad").replace("@hookimpl", ""), "validate", ["lacks @hookimpl"]),
    "has a parameter of another name": (
        serving("bad").replace("backends(register)", "backends(registry)"),
        "validate",
        ["unknown parameter 'registry'", "register"],
    ),
    "has one parameter too many": (
        serving("bad").replace("backends(register)", "backends(register, host)"),
        "validate",
        ["unknown parameter 'host'"],
    ),
    "has a parameter with a default": (
        serving("bad").replace("backends(register)", "backends(register=None)"),
        "validate",
        ["default never arrives"],
    ),
    "has no parameter": (
        HEAD + "@hookimpl\ndef inferplane_register_backends(): pass",
        "validate",
        ["no plain parameter"],
    ),
    "is a wrapper": (
        HEAD + "@hookimpl(wrapper=True)\ndef inferplane_register_backends(register): return (yield)",
        "validate",
        ["wrapper"],
    ),
    "raises in its hook": (
        HEAD + HOOK + "    register('bad', 'm:C')\n    raise OSError('half way')",
        "register",
        ["half way"],
    ),
    "registers another class": (HEAD + HOOK + "    register('bad', dict)", "validate", ["neither a Backend subclass"]),
    "registers an instance": (HEAD + HOOK + "    register('bad', 3)", "validate", ["'bad'", "3", "neither"]),
    "registers half a dotted name": (
        HEAD + HOOK + "    register('bad', 'module.Class')",
        "validate",
        ["'module.Class'"],
    ),
    "registers an abstract class": (
        HEAD + "class B(Backend):\n    name = 'bad'\n    torch_device = 'meta'\n" + HOOK + "    register('bad', B)",
        "validate",
        ["B lacks kernels, open, probe"],
    ),
    "registers another name than its class has": (
        HEAD + backend("other") + HOOK + "    register('bad', Fake_other)",
        "validate",
        ["'other'", "registered is 'bad'"],
    ),
    "has no torch device": (
        HEAD + backend("bad", more="torch_device = None") + HOOK + "    register('bad', Fake_bad)",
        "validate",
        ["torch_device is not a string"],
    ),
    "has words for a rank": (
        HEAD + backend("bad", more="auto_rank = 'first'") + HOOK + "    register('bad', Fake_bad)",
        "validate",
        ["auto_rank is 'first'"],
    ),
    "registers a malformed name": (
        HEAD + HOOK + "    register('Bad Device', 'm:C')",
        "validate",
        ["'Bad Device'", "malformed"],
    ),
    "registers a number for a name": (HEAD + HOOK + "    register(7, 'm:C')", "validate", ["7", "malformed"]),
    "registers auto": (HEAD + HOOK + "    register('auto', 'm:C')", "validate", ["'auto'"]),
    "registers twice": (HEAD + HOOK + "    register('bad', 'm:C')\n    register('bad', 'm:C')", "validate", ["twice"]),
    "registers too little": (HEAD + HOOK + "    register('bad')", "register", ["TypeError"]),
    "registers things for kernels": (
        serving("bad") + "@hookimpl\ndef inferplane_register_kernels(register): register('homely', [1])",
        "validate",
        ["kernels for 'homely'", "int, not a Kernel"],
    ),
    "registers one thing for kernels": (
        serving("bad") + "@hookimpl\ndef inferplane_register_kernels(register): register('homely', 1)",
        "validate",
        ["int is not a list"],
    ),
    "registers a number for a model": (
        serving("bad") + "@hookimpl\ndef inferplane_register_models(register): register('Net', 1)",
        "validate",
        ["architecture 'Net'"],
    ),
    "registers a number for a format": (
        serving("bad") + "@hookimpl\ndef inferplane_register_quantization(register): register('q4', 1)",
        "validate",
        ["quantization 'q4'"],
    ),
}


@pytest.mark.parametrize("wrong", BROKEN)
def test_broken_plugin(wheels, wrong):
    source, stage, words = BROKEN[wrong]
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad=source)
    wheels.install("zeta-good", "2.1", {"good": "fake_good"}, fake_good=serving("good"))
    host = wheels.discover()
    record = only_record(host)
    assert (record.stage, record.distribution, record.version) == (stage, "acme-bad", "0.3")
    assert (record.entry_point, record.devices) == ("bad", ("bad",))
    assert all(word in record.reason for word in words), record.reason
    assert record.remedy
    with pytest.raises(PluginError) as caught:
        host.backend("bad")
    assert all(word in str(caught.value) for word in ("acme-bad 0.3", stage, *words)), str(caught.value)
    assert names(host) == ["good", "homely"]
    assert host.backend("good").name == "good"
    assert host.backend("homely").name == "homely"
    assert [plugin.origin.entry_point for plugin in host.plugins()] == ["homely", "good"]


def test_versions_say_who_has_to_move(wheels):
    for major, remedy in ((2, "upgrade inferplane"), (0, "upgrade the plugin")):
        wheels.install(f"acme-{major}", "1", {f"bad{major}": f"bad{major}"})
        wheels.module(f"bad{major}", serving("bad").replace("(1, 0)", f"({major}, 0)"))
        record = next(r for r in wheels.discover().list_quarantined() if r.entry_point == f"bad{major}")
        assert record.remedy == remedy


def test_traceback_leads_to_the_plugins_line(wheels):
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad=HEAD + HOOK + "    register('Bad', 'm:C')")
    assert "fake_bad.py" in only_record(wheels.discover()).traceback


def test_names_learned_before_the_failure_are_kept(wheels):
    source = HEAD + HOOK + "    register('fam:one', 'm:C')\n    register('fam:two', 'm:C')\n    1 / 0"
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad=source)
    host = wheels.discover()
    assert only_record(host).devices == ("fam:one", "fam:two")
    for asked in ("fam:two", "fam"):
        with pytest.raises(PluginError, match="ZeroDivisionError"):
            host.backend(asked)


def test_half_a_registration_counts_for_nothing(wheels):
    source = (
        serving("bad") + "@hookimpl\ndef inferplane_register_models(register):\n    register('Net', 'm:f')\n    1 / 0"
    )
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad=source)
    host = wheels.discover()
    assert only_record(host).stage == "register"
    assert host.models() == {}
    assert names(host) == ["homely"]


def test_a_kept_callback_is_dead(wheels):
    source = serving("bad").replace("    register(", "    global kept\n    kept = register\n    register(")
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad=source)
    host = wheels.discover()
    import fake_bad

    with pytest.raises(PluginError, match="too late"):
        fake_bad.kept("late", "module:Class")
    assert names(host) == ["bad", "homely"]


def test_unreadable_entry_points_cost_only_their_own(wheels):
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"})
    (wheels.folder / "acme_bad-0.3.dist-info" / "entry_points.txt").write_text(
        "[inferplane.plugins]\nthis is no entry\n"
    )
    host = wheels.discover()
    record = only_record(host)
    assert (record.stage, record.distribution, record.version) == ("metadata", "acme-bad", "0.3")
    assert names(host) == ["homely"]


@pytest.mark.parametrize("value", ["no module!", "a:b:c", "a..b"])
def test_malformed_entry_point(wheels, value):
    wheels.install("acme-bad", "0.3", {"bad": value})
    record = only_record(wheels.discover())
    assert (record.stage, record.distribution, record.devices) == ("metadata", "acme-bad", ("bad",))
    assert repr(value) in record.reason


def test_metadata_without_a_name(wheels):
    for i in (1, 2):
        wheels.install(f"acme-{i}", "0.3", {f"toy{i}": f"fake_toy{i}"})
        wheels.module(f"fake_toy{i}", serving(f"toy{i}"))
        (wheels.folder / f"acme_{i}-0.3.dist-info" / "METADATA").write_text("")
    assert names(wheels.discover()) == ["homely", "toy1", "toy2"]


def test_a_class_is_no_plugin(wheels):
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad:Plugin"}, fake_bad="class Plugin:\n    INFERPLANE_API = (1, 0)")
    assert "is a class" in only_record(wheels.discover()).reason


def test_an_instance_is_a_plugin(wheels):
    source = f"""{HEAD}{backend("toy")}
class Plugin:
    INFERPLANE_API = (1, 0)
    def __getattr__(self, name):
        raise AssertionError("a plugin's attributes are not tried out")
    @property
    def dear(self):
        raise AssertionError("a plugin's properties are not run")
    @hookimpl
    def inferplane_register_backends(self, register):
        register("toy", Fake_toy)
    @staticmethod
    @hookimpl
    def inferplane_register_models(register):
        register("Net", "m:f")
plugin = Plugin()
"""
    wheels.install("acme-toy", "0.3", {"toy": "fake_toy:plugin"}, fake_toy=source)
    host = wheels.discover()
    assert not host.list_quarantined()
    assert names(host) == ["homely", "toy"]
    assert host.models() == {"Net": "m:f"}


def test_a_lazy_module_is_not_woken(wheels):
    source = serving("toy") + "def __getattr__(name):\n    raise AssertionError(f'asked for {name}')\n"
    wheels.install("acme-toy", "0.3", {"toy": "fake_toy"}, fake_toy=source)
    assert names(wheels.discover()) == ["homely", "toy"]


def test_a_hook_of_later_versions_may_be_optional(wheels):
    source = serving("toy") + "@hookimpl(optionalhook=True)\ndef inferplane_register_dreams(register, depth): pass\n"
    wheels.install("acme-toy", "0.3", {"toy": "fake_toy"}, fake_toy=source)
    assert names(wheels.discover()) == ["homely", "toy"]


def test_a_hook_under_another_name(wheels):
    source = serving("toy").replace("@hookimpl", "@hookimpl(specname='inferplane_register_backends')")
    source = source.replace("def inferplane_register_backends", "def devices")
    wheels.install("acme-toy", "0.3", {"toy": "fake_toy"}, fake_toy=source)
    host = wheels.discover()
    assert names(host) == ["homely", "toy"]
    assert host.plugins()[0].hooks == ("inferplane_register_backends",)


def test_ctrl_c_is_not_a_plugins_failure(wheels):
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad="raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        wheels.discover()


# -- later stages

LAZY = HEAD + HOOK + "    register('lazy', 'fake_lazy_backend:Fake_lazy')\n"
LOADS = {
    "module missing": (None, "ModuleNotFoundError"),
    "module raises": ("raise OSError('libvendor.so: cannot open')", "libvendor.so: cannot open"),
    "module ends the process": ("raise SystemExit(127)", "SystemExit"),
    "class missing": ("", "AttributeError"),
    "not a Backend": ("Fake_lazy = dict", "not a Backend subclass"),
    "other name": (HEAD + backend("lazy", more="name = 'idle'"), "'idle'"),
}


@pytest.mark.parametrize("wrong", LOADS)
def test_target_that_does_not_load(wheels, wrong):
    source, words = LOADS[wrong]
    if source is not None:
        wheels.module("fake_lazy_backend", source)
    wheels.install("acme-lazy", "4", {"lazy": "fake_lazy"}, fake_lazy=LAZY)
    host = wheels.discover()
    assert not host.list_quarantined(), "a backend is imported only when it is probed or chosen"
    assert names(host) == ["homely"]
    record = only_record(host)
    assert (record.stage, record.distribution, record.version, record.devices) == ("load", "acme-lazy", "4", ("lazy",))
    for ask in (host.backend, host.backend_for_explain, host.kernels):
        with pytest.raises(PluginError) as caught:
            ask("lazy")
        assert words in str(caught.value)
        assert "acme-lazy 4" in str(caught.value)
    assert len(host.list_quarantined()) == 1, "asking again adds no record"
    assert host.backend("homely").name == "homely"


PROBES = {
    "raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "ends the process": ("exit(3)", "SystemExit: 3"),
    "returns nothing": ("None", "returned None, not a Probe"),
    "returns words": ("'fine'", "returned 'fine', not a Probe"),
}


@pytest.mark.parametrize("wrong", PROBES)
def test_probe_that_fails(wheels, wrong):
    probe, words = PROBES[wrong]
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad=serving("bad", probe=probe))
    host = wheels.discover()
    assert not host.list_quarantined(), "nothing is probed before it is needed"
    entry = host.devices()[0]
    assert (entry.name, entry.distribution, entry.version) == ("bad", "acme-bad", "0.3")
    assert entry.probe.presence.value == "broken"
    assert words in entry.probe.reason
    assert (only_record(host).stage, only_record(host).version) == ("probe", "0.3")
    with pytest.raises(DeviceError) as caught:
        host.backend("bad")
    assert all(text in str(caught.value) for text in ("acme-bad 0.3", "broken", words, "homely"))
    assert host.backend_for_explain("bad").name == "bad"
    assert host.backend("auto").name == "homely"
    assert len(host.list_quarantined()) == 1


def test_constructor_that_fails(wheels):
    source = serving("bad", more="def __init__(self, index=0): raise OSError('no context')")
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad=source)
    host = wheels.discover()
    with pytest.raises(PluginError, match="no context"):
        host.backend("bad")
    assert only_record(host).stage == "load"
    assert names(host) == ["homely"]


def test_kernels_that_fail(wheels):
    for i, body in enumerate(("1 / 0", "return [print]", "return None")):
        source = serving(f"bad{i}") + f"def kernels(self):\n    {body}\nFake_bad{i}.kernels = kernels\n"
        wheels.install(f"acme-{i}", "0.3", {f"bad{i}": f"fake_bad{i}"})
        wheels.module(f"fake_bad{i}", source)
    host = wheels.discover()
    made = host.backend("bad0")
    for _ in range(2):
        with pytest.raises(PluginError, match="ZeroDivisionError"):
            host.kernels(made)
    assert only_record(host).distribution == "acme-0", "asking again adds no record"
    found = ("ZeroDivisionError", "item 0 is a builtin_function_or_method", "NoneType is not a list")
    for i, words in enumerate(found):
        with pytest.raises(PluginError) as caught:
            host.kernels(f"bad{i}")
        assert words in str(caught.value)
        assert f"acme-{i} 0.3" in str(caught.value)
        with pytest.raises(PluginError, match="kernels"):
            host.backend(f"bad{i}")
    assert {record.stage for record in host.list_quarantined()} == {"kernels"}
    assert host.kernels("homely") == []
    assert names(host) == ["homely"]

"""Kernels, models, weight formats and observers that plugins bring."""

from __future__ import annotations

import pytest

from inferplane import plugins
from inferplane.calibrate import load_methods
from inferplane.dialogue.replies.catalog import FORMS, find_form
from inferplane.errors import PluginError
from inferplane.types import Kernel
from tests.unit.support.fake_wheels import HEAD, only_record, serving

KERNEL_HOOK = "@hookimpl\ndef inferplane_register_kernels(register):\n"


def kernels_of(device, provider):
    return f"{HEAD}{KERNEL_HOOK}    register({device!r}, [Kernel('rms_norm', {provider!r}, 'm:f')])\n"


def test_backends_own_kernels_come_first(wheels):
    source = (
        serving("toy", "fam:one") + "def own(self): return [Kernel('rms_norm', 'own', 'm:f')]\nFake_toy.kernels = own\n"
    )
    wheels.install("zeta", "1", {"toy": "fake_toy"}, fake_toy=source)
    wheels.install("acme", "1", {"list": "fake_list"}, fake_list=kernels_of("toy", "list"))
    dotted = f"{HEAD}{KERNEL_HOOK}    register('toy', 'fake_dotted:kernels')\n"
    dotted += "def kernels(): return [Kernel('linear', 'dotted', 'm:f')]"
    wheels.install("beta", "1", {"dotted": "fake_dotted"}, fake_dotted=dotted)
    wheels.install("gamma", "1", {"other": "fake_other"}, fake_other=kernels_of("fam:one", "other"))
    host = wheels.discover()
    assert [kernel.provider for kernel in host.kernels("toy")] == ["own", "list", "dotted"]
    assert [kernel.provider for kernel in host.kernels(host.backend("toy"))] == ["own", "list", "dotted"]
    assert [kernel.provider for kernel in host.kernels("fam")] == ["other"]
    assert host.kernels("homely") == []
    assert not host.list_quarantined()


FAILING = {
    "not installed": ("'surely_not_installed:kernels'", "surely_not_installed"),
    "raises": ("'fake_bad:bad'", "ZeroDivisionError"),
    "is no function": ("'fake_bad:number'", "TypeError"),
    "returns other things": ("'fake_bad:other'", "item 1 is a int, not a Kernel"),
    "returns no list": ("'fake_bad:nothing'", "NoneType is not a list"),
}


@pytest.mark.parametrize("wrong", FAILING)
def test_kernel_plugin_that_fails_costs_only_itself(wheels, wrong):
    target, words = FAILING[wrong]
    source = f"""{HEAD}
number = 3
def bad(): return 1 / 0
def other(): return [Kernel('linear', 'bad', 'm:f'), 1]
def nothing(): return None
{KERNEL_HOOK}    register('homely', {target})
"""
    wheels.install("acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad=source)
    wheels.install("zeta", "1", {"good": "fake_good"}, fake_good=kernels_of("homely", "good"))
    host = wheels.discover()
    assert not host.list_quarantined(), "the list is asked for when the device is"
    for _ in range(2):
        assert [kernel.provider for kernel in host.kernels("homely")] == ["good"]
    record = only_record(host)
    assert (record.stage, record.distribution, record.version) == ("kernels", "acme-bad", "0.3")
    assert words in record.reason
    assert host.backend("homely").name == "homely"


@pytest.mark.parametrize("target", ["'no dots'", "'a:b:c'", "[Kernel]"])
def test_malformed_kernel_lists(wheels, target):
    wheels.install(
        "acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad=f"{HEAD}{KERNEL_HOOK}    register('homely', {target})\n"
    )
    assert only_record(wheels.discover()).stage == "validate"


def test_kernels_for_a_device_that_nobody_serves_are_told(wheels):
    wheels.install("acme", "1", {"list": "fake_list"}, fake_list=kernels_of("elsewhere", "list"))
    host = wheels.discover()
    assert host.notes() == ["acme 1 brings kernels for 'elsewhere', which no plugin serves"]
    assert not host.list_quarantined()


def test_a_backend_that_no_plugin_registered(wheels):
    host = wheels.discover()
    real = type(host.backend("homely"))

    class Mine(real):
        name = "mine"

        def kernels(self):
            return [Kernel("rms_norm", "mine", "m:f")]

    class Bad(Mine):
        def kernels(self):
            raise OSError("not today")

    assert [kernel.provider for kernel in host.kernels(Mine())] == ["mine"]
    with pytest.raises(PluginError, match="not today"):
        host.kernels(Bad())
    assert not host.list_quarantined()


def test_models_and_formats(wheels):
    source = f"""{HEAD}
def build(config): ...
@hookimpl
def inferplane_register_models(register):
    register("AcmeForCausalLM", build)
    register("ZetaForCausalLM", "zeta.models:build")
@hookimpl
def inferplane_register_quantization(register):
    register("acme-q4", "acme.formats:read")
"""
    wheels.install("acme", "1", {"acme": "fake_acme"}, fake_acme=source)
    host = wheels.discover()
    import fake_acme

    assert host.models() == {"AcmeForCausalLM": fake_acme.build, "ZetaForCausalLM": "zeta.models:build"}
    assert host.quantization() == {"acme-q4": "acme.formats:read"}
    host.models().clear()
    assert len(host.models()) == 2, "a copy is handed out"
    assert host.plugins()[0].hooks == ("inferplane_register_models", "inferplane_register_quantization")


OBSERVER = "seen = []\n@hookimpl\ndef inferplane_on_event(event):\n    seen.append(event)\n"


def test_an_observer_that_raises_is_not_called_again(wheels):
    wheels.install(
        "acme-bad", "0.3", {"bad": "fake_bad"}, fake_bad=serving("bad") + OBSERVER + "    raise SystemExit('enough')"
    )
    wheels.install("aaa", "1", {"good": "fake_good"}, fake_good=HEAD + OBSERVER)
    wheels.install("zzz", "1", {"also": "fake_also"}, fake_also=HEAD + OBSERVER)
    host = wheels.discover()
    import fake_also
    import fake_bad
    import fake_good

    first, second = plugins.Event("device.opened", {"device": "toy"}), plugins.Event("step")
    host.emit(first)
    host.emit(second)
    assert fake_good.seen == fake_also.seen == [first, second]
    assert fake_bad.seen == [first]
    record = only_record(host)
    assert (record.stage, record.distribution, record.version) == ("event", "acme-bad", "0.3")
    assert "enough" in record.reason
    assert host.backend("bad").name == "bad"


@pytest.mark.parametrize(
    ("target", "origin"),
    [
        ("'inferplane.kernels.composed.basic:rms_norm'", "inferplane 9.9"),
        ("composed_kernels()[0].target", "inferplane 9.9"),
        ("'inferplane_acme.kernels:f'", "acme 1"),
        ("own", "acme 1"),
    ],
)
def test_a_kernel_is_from_where_its_code_is(wheels, target, origin):
    """What a backend declares of core's kernels is not the plugin's."""
    source = f"{serving('toy')}from inferplane.kernels.composed import composed_kernels\ndef own(view, x): return x\n"
    source += f"Fake_toy.kernels = lambda self: [Kernel('rms_norm', 'torch', {target})]\n"
    wheels.install("acme", "1", {"toy": "fake_toy"}, fake_toy=source)
    host = wheels.discover()
    backend = host.backend("toy")
    (kernel,) = host.kernels(backend)
    assert host.origin(kernel, backend) == origin


FORM_HOOK = "from inferplane.plugin import ReplyForm\n\n@hookimpl\ndef inferplane_register_reply_forms(register):\n"


def test_reply_forms_of_plugins_come_before_those_in_tree(wheels):
    source = f"{HEAD}{FORM_HOOK}    register('acme', ReplyForm('acme', model_types=('qwen3',)))\n"
    wheels.install("acme", "1", {"form": "fake_form"}, fake_form=source)
    same = f"{HEAD}{FORM_HOOK}    register('qwen3', ReplyForm('qwen3'))\n"
    wheels.install("zeta", "1", {"same": "fake_same"}, fake_same=same)
    host = wheels.discover()
    assert [form.name for form in host.reply_forms()] == ["acme", *(form.name for form in FORMS)]
    assert find_form(None, "qwen3", host.reply_forms()).name == "acme"
    (record,) = host.list_quarantined()
    assert record.distribution == "zeta" and "'qwen3' is served by inferplane" in record.reason
    chosen = next(form for form in wheels.discover("qwen3@zeta").reply_forms() if form.name == "qwen3")
    assert chosen.tools == ()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("register('acme', 5)", "reply form 'acme': 5 is not a ReplyForm"),
        ("register('acme', ReplyForm('other'))", "its name is 'other'"),
        ("register('a b', ReplyForm('a b'))", "reply form name 'a b' is malformed"),
    ],
)
def test_reply_forms_that_are_none_are_quarantined(wheels, call, words):
    wheels.install("acme", "1", {"form": "fake_form"}, fake_form=f"{HEAD}{FORM_HOOK}    {call}\n")
    host = wheels.discover()
    (record,) = host.list_quarantined()
    assert words in record.reason and len(host.reply_forms()) == len(FORMS)


METHOD_HOOK = "from inferplane.calibrate import Method\n\n@hookimpl\ndef inferplane_register_calibration(register):\n"


def test_calibration_methods_of_plugins_stand_beside_those_in_tree(wheels):
    of_core = set(wheels.discover().calibration())
    source = f"{HEAD}{METHOD_HOOK}    register('half', lambda: Method('round', None, 'in half'))\n"
    wheels.install("acme", "1", {"half": "fake_half"}, fake_half=source)
    same = f"{HEAD}{METHOD_HOOK}    register('gptq', 'fake_same:make')\n"
    wheels.install("zeta", "1", {"same": "fake_same"}, fake_same=same)
    host = wheels.discover()
    assert set(host.calibration()) == {*of_core, "half"} and "gptq" in of_core
    assert load_methods(host.calibration())["half"].about == "in half"
    (record,) = host.list_quarantined()
    assert "'gptq' is served by inferplane" in record.reason
    assert wheels.discover("gptq@zeta").calibration()["gptq"] == "fake_same:make"


DRAFT_HOOK = "@hookimpl\ndef inferplane_register_proposers(register):\n"


def test_proposers_of_plugins_stand_beside_those_in_tree(wheels):
    assert set(wheels.discover().proposers()) == {"ngram", "suffix"}
    own = f"{HEAD}{DRAFT_HOOK}    register('echo', 'fake_echo:make')\n"
    wheels.install("acme", "1", {"echo": "fake_echo"}, fake_echo=own)
    same = f"{HEAD}{DRAFT_HOOK}    register('suffix', 'fake_same:make')\n"
    wheels.install("zeta", "1", {"same": "fake_same"}, fake_same=same)
    host = wheels.discover()
    assert set(host.proposers()) == {"ngram", "suffix", "echo"}
    assert host.proposers()["echo"].target == "fake_echo:make"
    (record,) = host.list_quarantined()
    assert "'suffix' is served by inferplane" in record.reason
    assert wheels.discover("suffix@zeta").proposers()["suffix"].target == "fake_same:make"
    again = f"{HEAD}{DRAFT_HOOK}    register('echo', 'fake_again:make')\n"
    wheels.install("other", "1", {"again": "fake_again"}, fake_again=again)
    host = wheels.discover()
    assert "echo" not in host.proposers() and "acme" in host.vacant_proposers()["echo"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("register('mtp', 'a:b')", "'mtp' cannot be registered"),
        ("register('a b', 'a:b')", "proposer name 'a b' is malformed"),
        ("register('echo', 5)", "target 5 is neither callable nor a dotted name"),
        ("register('echo', 'a:b'); register('echo', 'a:b')", "registered twice"),
    ],
)
def test_proposers_that_are_none_are_quarantined(wheels, call, words):
    wheels.install("acme", "1", {"echo": "fake_echo"}, fake_echo=f"{HEAD}{DRAFT_HOOK}    {call}\n")
    host = wheels.discover()
    (record,) = host.list_quarantined()
    assert words in record.reason and set(host.proposers()) == {"ngram", "suffix"}

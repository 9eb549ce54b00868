"""What the backends of accelerators share, on a made-up one that computes on the host."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from inferplane.errors import DeviceError
from inferplane.types import HOST, Accelerator, DeviceState, Features, Presence, Probe

RIVAL = "inferplane_rival"


class Acme(Accelerator):
    name = "acme"
    torch_device = HOST
    present = Presence.AVAILABLE

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.done: list[object] = []
        self.counted = 2

    @classmethod
    def probe(cls) -> Probe:
        return Probe(cls.present, "the driver is 7.1", "install the driver")

    def runtime(self) -> SimpleNamespace:
        return SimpleNamespace(
            is_available=lambda: self.counted > 0,
            device_count=lambda: self.counted,
            set_device=lambda index: self.done.append(f"set {index}"),
            synchronize=lambda index: self.done.append(f"wait {index}"),
            mem_get_info=lambda index: (30 + index, 40),
        )

    def open(self) -> DeviceState:
        with self.opening("cards that Acme can use", ("ACME_VISIBLE", "ACME_ORDER"), "see `acme-smi`", "fit them"):
            self.select()
            memory = self.memory()
        return DeviceState(self.torch_device_indexed, "Acme 1", "acme1", Features(), memory)

    def kernels(self) -> tuple[()]:
        return ()


class Outside(Acme):
    def open(self) -> DeviceState:
        self.require_free_slot((RIVAL,))
        return super().open()


def test_opening_sets_the_device_allocates_waits_and_tells_its_memory(monkeypatch):
    backend, zeros = Acme(1), torch.zeros

    def noted(*shape, device):
        backend.done.append(f"allocate on {device}")
        return zeros(*shape, device=device)

    monkeypatch.setattr(torch, "zeros", noted)
    state = backend.open()
    assert backend.done == ["set 1", f"allocate on {HOST}", "wait 1"]
    assert (state.memory.free_bytes, state.memory.total_bytes) == (31, 40)


def test_what_the_probe_refuses_is_not_opened(monkeypatch):
    monkeypatch.setattr(Acme, "present", Presence.BROKEN)
    backend = Acme()
    with pytest.raises(DeviceError, match=r"'acme' cannot be used: the driver is 7\.1\.") as caught:
        backend.open()
    assert caught.value.remedy == "install the driver" and not backend.done


def test_an_index_too_far_names_the_variables_that_choose(monkeypatch):
    monkeypatch.setenv("ACME_VISIBLE", "0,1")
    monkeypatch.delenv("ACME_ORDER", raising=False)
    with pytest.raises(DeviceError, match=f"{HOST} was requested") as caught:
        Acme(2).open()
    assert caught.value.there_is == "2 cards that Acme can use, ACME_VISIBLE=0,1, ACME_ORDER=not set"
    assert caught.value.remedy == "choose an index below 2"
    with (
        pytest.raises(DeviceError, match="Acme card 5 was requested"),
        Acme(5).opening("", (), "", device_label="Acme card"),
    ):
        pytest.fail("it was opened")


def test_where_nothing_can_be_used_the_remedy_says_where_to_look():
    backend = Acme()
    backend.counted = 0
    with pytest.raises(DeviceError) as caught:
        backend.open()
    assert caught.value.remedy == "see `acme-smi`"


def test_an_error_of_the_runtime_is_told_on_one_line_and_kept(monkeypatch):
    def fail(self):
        raise RuntimeError("out of memory\n  at line 1")

    monkeypatch.setattr(Acme, "touch", fail)
    with pytest.raises(DeviceError, match=r"RuntimeError: out of memory at line 1\.") as caught:
        Acme().open()
    assert caught.value.there_is == "the driver is 7.1" and caught.value.remedy == "see `acme-smi`; fit them"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_one_package_at_a_time_takes_torchs_place_for_outside_devices(monkeypatch):
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")
    Outside().open()
    monkeypatch.setitem(sys.modules, RIVAL, ModuleType(RIVAL))
    with pytest.raises(DeviceError, match=f"'{RIVAL}' occupies it in this process"):
        Outside().open()
    monkeypatch.delitem(sys.modules, RIVAL)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "other")
    with pytest.raises(DeviceError, match="'other' occupies it in this process"):
        Outside().open()


def test_the_clock_is_read_once_the_device_has_caught_up():
    backend = Acme()
    clock = backend.timer()
    assert not backend.done
    first = clock()
    assert backend.done == ["wait 0"] and clock() >= first
    assert backend.done == ["wait 0", "wait 0"]


def test_the_runtime_is_torchs_module_for_the_device():
    assert Accelerator.runtime(Acme()) is torch.cpu


def test_old_names_of_1_0_work_and_warn():
    backend = Acme(5)
    old = {"usable": "cards", "visible": ("ACME_ORDER",), "look": "see", "fit": "fit", "one": "Acme card"}
    with pytest.warns(DeprecationWarning, match=r"of Accelerator\.opening") as caught:
        context = backend.opening(**old)
    assert len(caught) == 5
    with pytest.raises(DeviceError, match="Acme card 5 was requested") as raised, context:
        pytest.fail("it was opened")
    assert "cards, ACME_ORDER" in raised.value.there_is
    with pytest.warns(DeprecationWarning, match="require_free_slot"):
        backend.require_free_place(rivals=())

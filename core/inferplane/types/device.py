"""What a backend reports about its hardware: before it is opened (`Probe`) and after (`DeviceState`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from inferplane.renamed import old_keywords

HOST = "cpu"
"""torch's name for host memory, where checkpoints are staged. Never used as the name of a backend."""


class Presence(Enum):
    """Outcome of a probe."""

    ABSENT = "absent"
    AVAILABLE = "available"
    BROKEN = "broken"


@dataclass(frozen=True)
class Probe:
    """Whether a backend can be used here. Built from metadata only, so probing is cheap, fork-safe and never raises.

    Args:
        presence: ABSENT (the runtime or the hardware is missing), AVAILABLE, or BROKEN (present but unusable).
        reason: one sentence for a person: what the probe looked for and found.
        remedy: what to install or change; if available, what would improve it, usually empty.
        versions: versions that matter, by package ("torch": "2.13.0").
        devices: number of devices seen; None if counting requires opening them.
    """

    presence: Presence
    reason: str
    remedy: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: int | None = None

    @property
    def available(self) -> bool:
        """True if the backend can be opened."""
        return self.presence is Presence.AVAILABLE


@dataclass(frozen=True)
class Feature:
    """Whether hardware has a feature, with the reason; `present` is None if that is unknown."""

    present: bool | None
    reason: str


class Features(Mapping[str, Feature]):
    """Named features of a device ("bf16", "fp8", "int8-dot"), each present, absent or unknown, with a reason.

    A feature that is not listed is unknown: a kernel that needs it is refused with "unknown on this device".
    """

    def __init__(self, known: Mapping[str, Feature] | Iterable[str] = ()) -> None:
        if isinstance(known, Mapping):
            self._known = dict(known)
        else:
            self._known = {name: Feature(True, "assumed") for name in known}

    def __getitem__(self, name: str) -> Feature:
        return self._known[name]

    def __iter__(self):  # type: ignore[no-untyped-def]  # noqa: ANN204 - Mapping's own signature
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    @old_keywords(wanted="required")
    def lacking(self, required: Iterable[str]) -> list[str]:
        """One sentence for each required feature that is absent or unknown."""
        out = []
        for name in required:
            feature = self._known.get(name)
            if feature is None:
                out.append(f"feature {name!r} is unknown on this device")
            elif not feature.present:
                word = "absent" if feature.present is False else "unknown"
                out.append(f"feature {name!r} is {word}: {feature.reason}")
        return out

    def key(self) -> tuple[tuple[str, bool | None], ...]:
        """Hashable summary, for the binding memo and the lock file's fingerprint."""
        return tuple(sorted((n, f.present) for n, f in self._known.items()))


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory: `total_bytes`, and `free_bytes` when this was measured."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class DeviceState:
    """An opened device.

    Args:
        torch_device: torch's name with the index ("meta:0").
        name: the hardware's product name.
        arch: architecture name; core never parses it.
        features: the device's features.
        memory: its memory in bytes.
        emulated: in words, what emulates the hardware; evidence then repeats it and proves only that results agree.
            Empty on real hardware.
    """

    torch_device: str
    name: str
    arch: str
    features: Features
    memory: Memory
    emulated: str = ""

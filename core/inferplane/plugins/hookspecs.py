"""The hooks that a plugin may implement. Each gets a callback, so a mistake raises at the plugin's own line.

An implementation may omit all parameters but the first, so a minor version can add parameters. None has a default,
because pluggy does not pass parameters with defaults.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import pluggy

from inferplane.dialogue.replies.forms import ReplyForm
from inferplane.types import Backend, Kernel, WeightFormat

PROJECT = "inferplane"
API_VERSION = (1, 1)
"""(major, minor). A plugin states the version it was written for: `INFERPLANE_API = (1, 1)`. Another major is refused.
A newer minor is refused too, because the plugin may use names that do not exist yet. An older minor works."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function as a plugin's implementation of a hook. `optionalhook=True` allows a hook this version lacks."""


@dataclass(frozen=True)
class Event:
    """An event for observers.

    Args:
        name: the event's name, dotted ("device.opened", "canary.demoted").
        facts: details as plain values.
    """

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


class RegisterBackend(Protocol):
    """`register(name, target)`: `name` is a device ("toy") or a family's variant ("family:variant"); `target` is a
    `Backend` class or its dotted name "module:Class", imported only when the device is probed or chosen."""

    def __call__(self, name: str, target: str | type[Backend]) -> None: ...


class RegisterKernels(Protocol):
    """`register(device, kernels)`: more kernels for a device that another plugin serves: a list, or the dotted name
    "module:function" of a function without parameters that returns one. It is called when that device is chosen."""

    def __call__(self, device: str, kernels: Sequence[Kernel] | str) -> None: ...


class RegisterQuantization(Protocol):
    """`register(method, target)`: the weight format of checkpoints whose config names this `quant_method`: a
    `WeightFormat`, a reader `(source, name, shard) -> QTensor`, a function of the config's `quantization_config` that
    returns one of them, or the dotted name of any of these."""

    def __call__(self, name: str, target: str | WeightFormat | Callable[..., Any]) -> None: ...


class RegisterModel(Protocol):
    """`register(architecture, target)`: a model family by the name in `config.json`; its constructor or dotted name."""

    def __call__(self, architecture: str, target: str | Callable[..., Any]) -> None: ...


class RegisterReplyForms(Protocol):
    """`register(name, form)`: how a family of models writes thoughts and tool calls: a `ReplyForm` of that name.
    Of forms that fit a chat template alike, a plugin's counts before those in-tree."""

    def __call__(self, name: str, form: ReplyForm) -> None: ...


class RegisterCalibration(Protocol):
    """`register(name, target)`: a calibration method of `inferplane quantize --method`: a function that returns its
    `inferplane.calibrate.Method`, or the dotted name of one."""

    def __call__(self, name: str, target: str | Callable[..., Any]) -> None: ...


class RegisterProposers(Protocol):
    """`register(name, target)`: a method of speculation, as in `speculative_config={"method": name}`: a class or
    function `(context, **options)` that returns an `inferplane.engine.speculate.Proposer`, or the dotted name of one.
    `context` is a `ProposerContext`; its further parameters are the method's own options."""

    def __call__(self, name: str, target: str | Callable[..., Any]) -> None: ...


@hookspec
def inferplane_register_backends(register: RegisterBackend) -> None:
    """Register backends: kinds of hardware that users name with `device=`."""


@hookspec
def inferplane_register_kernels(register: RegisterKernels) -> None:
    """Register kernels for devices that another plugin serves."""


@hookspec
def inferplane_register_quantization(register: RegisterQuantization) -> None:
    """Register weight formats by the `quant_method` of the checkpoints that have them."""


@hookspec
def inferplane_register_models(register: RegisterModel) -> None:
    """Register model families."""


@hookspec
def inferplane_register_reply_forms(register: RegisterReplyForms) -> None:
    """Register forms of thoughts and tool calls, by the names that users choose them by."""


@hookspec
def inferplane_register_calibration(register: RegisterCalibration) -> None:
    """Register calibration methods, by the names that users choose them by."""


@hookspec
def inferplane_register_proposers(register: RegisterProposers) -> None:
    """Register what drafts tokens without a network, by the names of methods of speculation."""


@hookspec
def inferplane_on_event(event: Event) -> None:
    """Observe an event. Called on the thread of the event, so return fast. Never called while a token is computed."""


HOOKS: dict[str, tuple[str, ...]] = {
    spec.__name__: tuple(inspect.signature(spec).parameters)
    for spec in (
        inferplane_register_backends,
        inferplane_register_kernels,
        inferplane_register_quantization,
        inferplane_register_models,
        inferplane_register_reply_forms,
        inferplane_register_calibration,
        inferplane_register_proposers,
        inferplane_on_event,
    )
}
"""Every hook and its parameters. An implementation must take the first."""

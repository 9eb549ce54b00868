"""What is promised to plugin authors can be worked from: docstrings with shapes, and for ops the formula's source."""

from __future__ import annotations

from inspect import isclass, isfunction

from inferplane import plugin
from inferplane.ops import OPS
from tests.house import rules
from tests.house.rules import none


def test_everything_promised_is_documented():
    promised = {name: getattr(plugin, name) for name in plugin.__all__}
    documented = {name: thing for name, thing in promised.items() if isclass(thing) or isfunction(thing)}
    assert documented, "inferplane.plugin promises nothing"
    none([line for name, thing in sorted(documented.items()) for line in rules.undocumented(name, thing)])


def test_every_op_can_be_implemented_from_its_docstring():
    assert OPS, "there are no ops"
    ops = sorted(OPS.items())
    none([line for name, op in ops for line in (*rules.unexplained_op(name, op), *rules.undocumented(name, op))])


class Tensor: ...


class Documented:
    """Scales x [rows, columns]."""

    layout: object = len
    rounding: object = lambda x: x

    def scale(self, x: Tensor) -> Tensor:
        """Each entry times two."""

    @property
    def size(self) -> int:
        """Bytes."""

    def _private(self): ...


class Undocumented:
    """Nothing about its list[int]."""

    def scale(self, x: Tensor) -> Tensor:
        """Each entry times two."""

    @classmethod
    def of(cls): ...

    @property
    def size(self) -> int: ...


class Inherits(Documented): ...


class GoodOp:
    """y = x / rms(x).

    x: [tokens, hidden], float; returns the same shape.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """


class BadOp:
    """y = x / rms(x), a list[float]."""


def test_planted_faults_are_found():
    none(rules.undocumented("Documented", Documented))
    none(rules.unexplained_op("good", GoodOp))
    found = rules.undocumented("Undocumented", Undocumented)
    assert [line.split(":")[0] for line in found] == ["Undocumented.scale", "Undocumented.of", "Undocumented.size"]
    assert rules.undocumented("Inherits", Inherits) == ["Inherits: no docstring"]
    assert len(rules.unexplained_op("bad", BadOp)) == 2
    assert rules.unexplained_op("inherits", Inherits) == ["op inherits: no docstring"]

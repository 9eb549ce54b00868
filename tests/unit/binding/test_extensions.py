"""Kernels that were written before an op got a field, or before an op above it got another child, are refused there."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from inferplane.errors import KernelError
from inferplane.ops import EXTENSIONS, OPS, Linear, Op, RMSNorm, extension, placeholder
from inferplane.ops.model import SEVERAL_TABLES, DecoderLayer, DecoderStack
from inferplane.ops.op import Sample
from inferplane.types import HOST, KVCache, Weight, When
from inferplane.types.batch import Query, make_batch
from tests.unit.support.small import chosen, kernel, lost, plan


@pytest.fixture
def ops():
    """Ops of this module, taken out of the registry afterwards."""
    before, known = dict(OPS), set(EXTENSIONS)

    class OldNorm(Op, name="test_old_norm"):
        weight: Weight
        offset: float = extension(0.0)
        bias: Weight | None = extension(None)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.weight + self.offset)

        @classmethod
        def samples(cls):
            return [Sample("one", cls(placeholder(4)), lambda d: (d.normal(2, 4),))]

    class NewNorm(OldNorm, name="test_new_norm", extension=True):
        pass

    class Block(Op, name="test_block"):
        norm: OldNorm
        linear: Linear

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x))

    class Stack(Op, name="test_stack"):
        first: Block
        second: Block

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    def block(norm: Op) -> Op:
        return Block(norm, Linear(placeholder(4, 4)))

    yield {"old": OldNorm, "new": NewNorm, "block": block, "stack": Stack}
    OPS.clear()
    OPS.update(before)
    EXTENSIONS.clear()
    EXTENSIONS.update(known)


def test_fields_at_their_defaults_are_no_extensions(ops):
    norm = ops["old"](placeholder(4))
    assert norm.extensions() == frozenset()
    assert chosen(plan(norm, kernel("test_old_norm"))) == "vendor:test_old_norm"
    assert RMSNorm(placeholder(4), 1e-6).extensions() == frozenset()


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"offset": 1.0}, "test_old_norm.offset"), ({"bias": placeholder(4)}, "test_old_norm.bias")],
)
def test_a_kernel_that_does_not_list_a_field_is_refused(ops, fields, name):
    norm = ops["old"](placeholder(4), **fields)
    assert norm.extensions() == {name}
    p = plan(norm, kernel("test_old_norm"))
    assert chosen(p) == "reference"
    assert lost(p, "", "vendor:test_old_norm") == f"does not compute {name}"
    knows = kernel("test_old_norm", "new", when=When(extensions=(name,)))
    assert chosen(plan(norm, kernel("test_old_norm"), knows)) == "new:test_old_norm"


def test_the_kernel_of_an_op_above_is_refused(ops):
    block = ops["block"](ops["old"](placeholder(4), offset=1.0))
    p = plan(block, kernel("test_block"), kernel("test_old_norm"))
    assert chosen(p) == "decomposition" and chosen(p, "norm") == "reference"
    assert lost(p, "", "vendor:test_block") == "does not compute test_old_norm.offset"
    knows = kernel("test_block", when=When(extensions=("test_old_norm.offset",)))
    assert chosen(plan(block, knows)) == "vendor:test_block"


def test_an_op_that_is_an_extension_is_one_for_those_above_alone(ops):
    norm = ops["new"](placeholder(4))
    assert norm.extensions() == frozenset()
    assert chosen(plan(norm, kernel("test_new_norm"))) == "vendor:test_new_norm"
    p = plan(ops["block"](norm), kernel("test_block"))
    assert lost(p, "", "vendor:test_block") == "does not compute test_new_norm"
    knows = kernel("test_block", when=When(extensions=("test_new_norm",)))
    assert chosen(plan(ops["block"](norm), knows)) == "vendor:test_block"


def test_a_kernel_that_inlines_answers_for_the_children_that_it_inlines(ops):
    plain, other = ops["block"](ops["old"](placeholder(4))), ops["block"](ops["old"](placeholder(4), offset=2.0))
    block = kernel("test_block", when=When(extensions=("test_old_norm.offset",)))
    first_only = kernel("test_stack", inlines={"first": (block.name,)})
    assert chosen(plan(ops["stack"](plain, other), block, first_only)) == "vendor:test_stack"
    p = plan(ops["stack"](other, plain), block, first_only)
    assert lost(p, "", "vendor:test_stack") == "does not compute test_old_norm.offset"


def test_an_unknown_extension_is_a_wrong_declaration(ops):
    wrong = kernel("rms_norm", when=When(extensions=("rms_norm.ofset",)))
    with pytest.raises(KernelError, match=r"the extension 'rms_norm\.ofset', which is unknown") as caught:
        plan(RMSNorm(placeholder(4), 1e-6), wrong)
    assert "test_old_norm.offset" in str(caught.value)


@pytest.mark.parametrize(("windows", "refused"), [((None, None), False), ((5, 5), False), ((None, 5), True)])
def test_a_kernel_of_several_layers_has_to_know_that_their_tables_differ(windows, refused):
    like = DecoderLayer.samples()[0].op

    def layer(window):
        request = replace(like.attn.enter.write.kv, window=window)
        enter = replace(like.attn.enter, write=replace(like.attn.enter.write, kv=request))
        few, many = (replace(each, kv=request) for each in (like.attn.few, like.attn.many))
        return replace(like, attn=replace(like.attn, enter=enter, few=few, many=many))

    stack = DecoderStack(tuple(layer(window) for window in windows))
    p = plan(stack, kernel("decoder_stack"))
    assert (chosen(p) == "vendor:decoder_stack") != refused
    assert not refused or lost(p, "", "vendor:decoder_stack") == "does not compute decoder_stack.several_tables"
    assert (
        chosen(plan(stack, kernel("decoder_stack", when=When(extensions=(SEVERAL_TABLES,))))) == "vendor:decoder_stack"
    )


def test_each_layer_of_a_stack_sees_its_table():
    seen = []

    def layer(x, residual, batch, kv):
        seen.append((batch.block_tables.tolist(), batch.slots.tolist(), kv))
        return x + 1, residual

    batch = make_batch([Query([7], 5, [3, 1], None, [[4, 6]])], block_tokens=4, device=HOST)
    caches = tuple(object() for _ in range(3))
    x, _ = DecoderStack.__call__(
        SimpleNamespace(layers=(layer,) * 3, taps=()),
        torch.zeros(1),
        None,
        batch,
        KVCache(caches, 9, 4, tables=(1, 0, 1)),
    )
    further, first = ([[4, 6]], [25]), ([[3, 1]], [5])
    assert seen == [(*table, kv) for table, kv in zip((further, first, further), caches)] and x == 3

"""Results of a wrong size, and of memory that is not the result's own, pass on no op, sample or dtype."""

import inspect

import pytest
import torch

from inferplane.binding import run_case
from inferplane.binding.case import OP_DTYPES, scale_error
from inferplane.ops import OPS, Linear, Sample, placeholder
from tests.unit.binding.test_check import IN_TREE, bench
from tests.unit.support.small import BF16, DTYPES, kernel

FAULTS = {
    "half": lambda t: t * 0.5,
    "zero": torch.zeros_like,
    "negated": lambda t: -t,
    "tripled": lambda t: t * 3,
    "last row halved": lambda t: torch.cat((t[:-1], t[-1:] * 0.5)),
    "nan": lambda t: t * torch.nan,
}
WRITES = tuple(op.name for op in IN_TREE if op.writes_cache)
CHOOSES = ("sample", "index_select", "lightning_indexer", "compressed_indexer")
SAMPLED = [op for op in IN_TREE if op.samples() and op.name not in (*WRITES, *CHOOSES)]


def faulty(op, change):
    """A kernel that computes the op by its body, then changes each result of a float dtype."""

    def call(view, *args):
        result = view.body(*args)
        one = not isinstance(result, tuple)
        changed = tuple(
            change(t) if t is not None and t.dtype in OP_DTYPES else t for t in ((result,) if one else result)
        )
        return changed[0] if one else changed

    call.__signature__ = inspect.signature(OPS[op].__call__)
    return kernel(op, target=call, inlines={"none": ("none",)})  # whose view has the body


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("op", SAMPLED, ids=lambda op: op.name)
def test_no_wrong_size_passes_the_smallest_sample(op, fault, dtype):
    sample = op.samples()[0]
    outcome = run_case(faulty(op.name, FAULTS[fault]), sample, bench(dtype), poisoned=True)
    assert outcome.served and not outcome.passed and "raised" not in outcome.detail, outcome


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", SAMPLED, ids=lambda op: op.name)
def test_right_results_pass(op, dtype):
    assert run_case(faulty(op.name, torch.clone), op.samples()[0], bench(dtype), poisoned=True).passed


def draw_of(dtype):
    from tests.unit.ops.test_contract import draw

    return draw(dtype=dtype)


SMALL_ROWS = Sample(
    "small_rows",
    Linear(placeholder(48, 64)),
    lambda d: (d.normal(4, 64) * torch.tensor([[1.0], [0.02], [3.0], [0.1]]).to(d.dtype),),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("factor", [0, 0.5, 2, 1])
def test_a_small_row_beside_a_large_one_is_held_to_its_own_size(dtype, row, factor):
    def change(t):
        out = t.clone()
        out[row] *= factor
        return out

    outcome = run_case(faulty("linear", change), SMALL_ROWS, bench(dtype))
    assert outcome.passed == (factor == 1), outcome
    if factor != 1 and row == 1 and dtype is BF16:
        assert outcome.detail == f"row {row} of result 0 has {factor:.2g} times the size that it should have"


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([[1.0, 2.0], [0.001, 0.002]], ""),
        ([[1.0, 2.0], [0.0005, 0.001]], "row 1 of result 0 has 0.5 times"),
        ([[1.0, 2.0], [0.0, 0.0]], "row 1 of result 0 has 0 times"),
        ([[1.0, 2.0], [-0.001, -0.002]], "row 1 of result 0 has -1 times"),
    ],
)
def test_sizes_are_compared_row_by_row(got, words):
    ideal = torch.tensor([[1.0, 2.0], [0.001, 0.002]])
    assert scale_error(torch.tensor(got), ideal, 1e-2).startswith(words)
    assert bool(scale_error(torch.tensor(got), ideal, 1e-2)) == bool(words)
    noise = ideal * torch.tensor([[1.0], [0.01]])
    assert not scale_error(torch.zeros_like(noise).index_put((torch.tensor([0]),), noise[0]), noise, 1e-2)


def test_rows_of_zeros_have_no_size():
    zero = torch.zeros(3, 4)
    assert scale_error((zero, torch.tensor([1, 2])), (zero, torch.tensor([1, 2])), 1e-5) == ""
    assert scale_error(None, None, 1e-5) == ""


class Keeps:
    """A kernel of `linear` with a buffer of its own, wrong in one way."""

    def __init__(self, how):
        self.how, self.buffer, self.calls = how, None, 0

    def __call__(self, view, x):
        y, self.calls = OPS["linear"].__call__(view, x), self.calls + 1
        if self.how == "raises later" and self.calls > 1:
            raise RuntimeError("no more streams")
        if self.buffer is None or self.how == "fresh":
            self.buffer = torch.empty_like(y)
        self.buffer.copy_(y)
        return self.buffer if self.how != "view" else self.buffer.view_as(y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("fresh", ""),
        ("buffer", "a second call changed result 0 of the first: it returns memory that it keeps"),
        ("view", "a second call changed result 0 of the first: it returns memory that it keeps"),
        ("raises later", "a second call raised RuntimeError: no more streams at "),
    ],
)
def test_results_are_not_kept(how, words, dtype):
    keeps = Keeps(how)
    target = lambda p, x: keeps(p, x)  # noqa: E731
    outcome = run_case(kernel("linear", target=target), Linear.samples()[0], bench(dtype))
    assert outcome.passed == (not words) and outcome.detail.startswith(words)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, residual, norm, total: (norm, x), ""),
        (lambda x, residual, norm, total: (x, total), ""),
        (lambda x, residual, norm, total: (norm, x.copy_(total)), "it changed argument 0"),
        (lambda x, residual, norm, total: (norm, residual.copy_(total)), "it changed argument 1"),
        (lambda x, residual, norm, total: (norm.double(), total), "result 0 has dtype torch.float64"),
        (lambda x, residual, norm, total: (norm[:1], total), "result 0 has shape"),
        (lambda x, residual, norm, total: norm, "1 results instead of 2"),
    ],
    ids=["input as sum", "input as norm", "sum in place of x", "sum in place of the residual", "dtype", "shape", "one"],
)
def test_the_input_is_not_the_result(change, words, dtype):
    sample = next(s for s in OPS["add_rms_norm"].samples() if s.inputs(draw_of(dtype))[1] is not None)
    target = lambda view, x, residual: change(x, residual, *view.body(x, residual))  # noqa: E731
    outcome = run_case(kernel("add_rms_norm", target=target, inlines={"none": ("none",)}), sample, bench(dtype))
    assert outcome.served and not outcome.passed and outcome.detail.startswith(words)
    assert words or "raised" not in outcome.detail

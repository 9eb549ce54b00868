"""The mock's tensors keep their promise: the host cannot read them, and nothing of the host's mixes with them."""

from __future__ import annotations

import pytest
import torch

from inferplane.binding import run_case
from inferplane.ops import MoEExperts
from inferplane.types import HOST
from tests.mock_device import hidden
from tests.mock_device.conftest import bench_of

pytestmark = pytest.mark.usefixtures("mock")


def on_device(*shape):
    return torch.randn(*shape).to(hidden.DEVICE)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0, 0].item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: float(x.sum()),
        lambda x: int(x[0, 0] > 0),
        lambda x: x.numpy(),
        lambda x: x.__array__(),
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: x if x.max() > 0 else None,
        lambda x: [1, 2][x.argmax()],
        lambda x: x + torch.ones(2, 3),
        lambda x: torch.cat((x, torch.ones(2, 3))),
        lambda x: torch.nn.functional.linear(x, torch.ones(5, 3)),
    ],
)
def test_the_host_cannot_read(mode, read):
    x = on_device(2, 3)
    with mode(), pytest.raises(hidden.ReadByHost):
        read(x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_allowed(mode):
    values = torch.randn(2, 3)
    x = values.to(hidden.DEVICE)
    with mode():
        assert type(x) is hidden.DeviceTensor and x.device.type == hidden.DEVICE and x.shape == (2, 3)
        assert torch.equal(x.to(HOST), values) and type(x.to(HOST)) is torch.Tensor
        assert torch.equal((x * 2 + 1).to(torch.float64).to(HOST), (values * 2 + 1).double())
        assert torch.empty(4, device=x.device).to(HOST).isnan().all() and x.new_empty(3).to(HOST).isnan().all()
        assert torch.arange(3, 7, device=x.device).to(HOST).tolist() == [3, 4, 5, 6]
        assert torch.tensor([1, 2], device=hidden.DEVICE).to(HOST).tolist() == [1, 2]
        view = x.view(6)
        view[1:3] = 7.0
        assert x.to(HOST).flatten()[1:3].tolist() == [7.0, 7.0]
        target = torch.zeros(2, 3)
        target.copy_(x)
        assert torch.equal(target, x.to(HOST))


def test_a_body_that_reads_the_device_is_found(monkeypatch):
    """As core's own body of this op once did."""
    sample, bench, sound = MoEExperts.samples()[0], bench_of("mock:norm"), MoEExperts.__call__

    def reads(self, x, weights, ids):
        first = ids.flatten().tolist()[0] if x.device.type != HOST else 0
        return sound(self, x, weights, ids) + 0 * first

    assert run_case(None, sample, bench).passed
    monkeypatch.setattr(MoEExperts, "__call__", reads)
    outcome = run_case(None, sample, bench)
    assert not outcome.passed and "ReadByHost" in outcome.detail

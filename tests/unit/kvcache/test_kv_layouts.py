"""Descriptions of paged layouts, and scales that one head does not impose on another."""

import pytest
import torch

from inferplane.errors import UsageError
from inferplane.kvcache import KV_DTYPES, BlockedKV, paged_layout
from inferplane.types import KVRequest
from tests.unit.support.small import F32


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8"])
def test_scales_are_by_token_and_head(kv_dtype):
    kv = paged_layout(4, kv_dtype).build(KVRequest("gqa", 2, 32, 32), 2, F32, torch.device("cpu"))
    k = torch.randn(3, 2, 32)
    k[1, 0] *= 1e4
    k[2] = 0
    kv.write(torch.tensor([0, 1, 2]), k, k)
    got = kv.read(torch.tensor([0]), 3)[0]
    error = (got - k).abs().amax(-1)
    assert (error <= k.abs().amax(-1) * KV_DTYPES[kv_dtype].error * 1.001).all()
    assert not got[2].any()


def test_latents_and_rotated_keys_have_scales_of_their_own():
    kv = paged_layout(4, "int8").build(KVRequest("mla", 1, 512 + 64), 1, F32, torch.device("cpu"))
    x = torch.randn(1, 576)
    x[:, 512:] *= 1000
    kv.write(torch.tensor([0]), x)
    error = (kv.read(torch.tensor([0]), 1)[0] - x).abs()
    assert error[:, :512].max() < 0.05


def test_a_stated_error_is_reached():
    """The layouts' tolerance is half a step of the format: neither too small nor generous."""
    x = torch.linspace(-1, 1, 20001).view(1, 1, -1)
    for name in ("fp8", "int8"):
        kv = paged_layout(1, name).build(KVRequest("gqa", 1, x.shape[-1], 1), 1, F32, torch.device("cpu"))
        kv.write(torch.tensor([0]), x, x[..., :1])
        error = (kv.read(torch.tensor([0]), 1)[0] - x).abs().max().item()
        assert 0.95 * KV_DTYPES[name].error < error <= 1.001 * KV_DTYPES[name].error


def test_layouts_that_cannot_be():
    with pytest.raises(UsageError, match=r"'fp3'.*auto, fp8, int4, int8, k8v4"):
        paged_layout(16, "fp3")
    with pytest.raises(UsageError, match="block of 0 tokens"):
        paged_layout(0)


def test_layouts_are_equal_by_what_they_say():
    assert paged_layout(16) == paged_layout(16) != paged_layout(16, "fp8")
    assert paged_layout(16).tolerance == 0 < paged_layout(16, "int8").tolerance < paged_layout(16, "fp8").tolerance


def test_a_layout_written_for_0_1_still_lists_its_tensors():
    with pytest.warns(DeprecationWarning, match=r"Old\.stored is deprecated; use list_tensors"):

        class Old(BlockedKV):
            def __init__(self):
                self.data = torch.arange(6.0).view(3, 2)

            def write(self, slots, *values): ...

            def read(self, table, tokens): ...

            def stored(self):
                return (self.data,)

    kv = Old()
    assert kv.list_tensors()[0] is kv.data
    kv.copy_blocks(torch.tensor([0]), torch.tensor([2]))
    assert torch.equal(kv.export(torch.tensor([2]))[0], torch.tensor([[0.0, 1.0]]))

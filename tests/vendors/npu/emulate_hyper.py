"""Hyper-connections, as their pages describe them, all for the 950 alone.

Pages: Ascend/op-plugin at 517f2e7d, docs/zh/custom_APIs/torch_npu. Along which index npu_mhc_post sums the mixing
matrix is as in the vendor's test there (test/test_custom_ops/test_npu_mhc_post.py); the page's formula says the other.
"""

from __future__ import annotations

import torch

from tests.vendors.calls import make_open
from tests.vendors.emulator import Implementations, require
from tests.vendors.npu import chip

IMPLEMENTATIONS = emulates = Implementations()
STREAMS = (4, 6, 8)


@emulates("npu::npu_mhc_pre")
def mhc_pre(x, phi, alpha, bias, gamma, norm_eps, hc_eps, out_flag, inner_precise):
    """Of tokens [T, n, D]: their sum by pre's factors, post's factors, and the logits of a mixing matrix, or one zero
    where alpha has two entries."""
    chip.runs_on("npu_mhc_pre", "950")
    chip.unused(gamma=gamma, out_flag=out_flag, inner_precise=inner_precise)
    chip.dtype("x", x, *chip.HALF)
    chip.shape("x", x, None, None, None)
    tokens, n, width = x.shape
    require(tokens > 0 and n in STREAMS, f"4, 6 or 8 streams of one token at least, got {[tokens, n]}")
    require(1 <= width <= 16384 and width % 16 == 0, f"a width of a multiple of 16 up to 16384, got {width}")
    for name, tensor in (("phi", phi), ("alpha", alpha), ("bias", bias)):
        require(tensor.dtype is torch.float32, f"{name} is float32, got {tensor.dtype}")
    require(alpha.shape in ((2,), (3,)), f"alpha has 2 or 3 entries, got {list(alpha.shape)}")
    mixes = alpha.shape[0] == 3
    rows = n * n + 2 * n if mixes else 2 * n
    chip.shape("phi", phi, rows, n * width)
    chip.shape("bias", bias, rows)
    streams = x.double()
    rms = (streams.square().mean((1, 2)) + norm_eps).sqrt()
    mix = torch.einsum("tnd,rnd->tr", streams, phi.double().view(rows, n, width)) / rms[:, None]
    pre = torch.sigmoid(alpha[0] * mix[:, :n] + bias[:n]) + hc_eps
    post = 2 * torch.sigmoid(alpha[1] * mix[:, n : 2 * n] + bias[n : 2 * n])
    logits = (alpha[2] * mix[:, 2 * n :] + bias[2 * n :]).view(tokens, n, n) if mixes else torch.zeros(1)
    collapsed = torch.einsum("tn,tnd->td", pre, streams).to(x.dtype)
    return collapsed, post.float(), logits.float(), make_open(), make_open(), make_open()


@emulates("npu::npu_mhc_sinkhorn")
def mhc_sinkhorn(x, eps, num_iters, out_flag):
    """Softmax of rows and columns to sum one, then rows and columns in turns."""
    chip.runs_on("npu_mhc_sinkhorn", "950")
    chip.unused(out_flag=out_flag)
    require(x.dtype is torch.float32, f"x is float32, got {x.dtype}")
    chip.shape("x", x, None, x.shape[-1], x.shape[-1])
    require(x.numel() > 0 and x.shape[-1] in STREAMS, f"4, 6 or 8 streams, got {list(x.shape)}")
    require(1 <= num_iters <= 100, f"1 to 100 iterations, got {num_iters}")
    m = x.double().softmax(-1) + eps
    for i in range(2 * num_iters - 1):
        m = m / (m.sum(-1 if i % 2 else -2, keepdim=True) + eps)
    return m.float(), make_open(), make_open()


@emulates("npu::npu_mhc_post")
def mhc_post(x, h_res, h_out, h_post):
    """Stream k of the result: the block's result by its factor, and the streams by column k of the matrix."""
    chip.runs_on("npu_mhc_post", "950")
    chip.dtype("x", x, *chip.HALF)
    chip.same_dtype("x and h_out", x, h_out)
    require(h_res is not None, "a sum without mixing is not emulated")
    tokens, n, width = x.shape
    for name, tensor, shape in (("h_res", h_res, (tokens, n, n)), ("h_post", h_post, (tokens, n))):
        require(tensor.dtype is torch.float32, f"{name} is float32, got {tensor.dtype}")
        chip.shape(name, tensor, *shape)
    chip.shape("h_out", h_out, tokens, width)
    out = torch.einsum("tjk,tjd->tkd", h_res.double(), x.double())
    return (out + h_post.double()[..., None] * h_out.double()[:, None]).to(x.dtype)

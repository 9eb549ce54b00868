"""Kernels of other libraries against the signatures these publish; what they mean, on the host in the libraries' place.

`provider_signatures.json` says for each where it was read and how far that proves it.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from inferplane.binding import Bench, run_case
from inferplane.ops import (
    Attention,
    Linear,
    MLAAbsorbed,
    MLADims,
    Sample,
    SparseMLAAbsorbed,
    SparseMLAExpanded,
    placeholder,
)
from inferplane.ops.sparse.attention import draw_positions
from inferplane.plugin import HOST, Features, KernelError, KVRequest, UsageError
from inferplane_cuda.kernels import hopper_kernels, providers
from inferplane_cuda.kvcache import list_paged_layouts
from inferplane_cuda.tuning import TUNING_VARIABLE, find_fastest, load_measured, rank_measured

SIGNATURES = json.loads((Path(__file__).parent / "provider_signatures.json").read_text())
SOURCES = "INFERPLANE_PROVIDER_SOURCES"
"""Folders, as in PATH, with the libraries' own source; an installed library is found without."""
FEATURES = Features(["sm90", *providers.LIBRARIES])


def published(name: str, body: Any, which: str = "parameters") -> Any:
    """A function with a published signature, which hands its arguments by name to `body`."""
    space = {"body": body}
    exec(f"def made({SIGNATURES[name][which]}):\n    return body(locals())", space)
    return space["made"]


def source_of(file: str) -> Path | None:
    """Where a library's file lies, without importing it."""
    top = file.partition("/")[0].removesuffix(".py")
    spec = importlib.util.find_spec(top) if top not in sys.modules else None
    installed = [Path(spec.origin).parents["/" in file]] if spec and spec.origin else []
    folders = [Path(p) for p in os.environ.get(SOURCES, "").split(os.pathsep) if p] + installed
    return next((folder / file for folder in folders if (folder / file).is_file()), None)


def signatures_in(file: Path, name: str) -> dict[str, str]:
    """Parameters of a function, or of a class's methods that are called, as its source has them."""
    made = next(n for n in ast.parse(file.read_text()).body if getattr(n, "name", "") == name)
    if isinstance(made, ast.FunctionDef):
        return {"parameters": bare(made.args)}
    methods = {m.name: m for m in made.body if isinstance(m, ast.FunctionDef)}  # type: ignore[attr-defined]
    keys = {"parameters": "__init__", "plan": "plan", "run": "run"}  # of overloads the last one is the function
    return {key: bare(methods[method].args) for key, method in keys.items()}


def bare(arguments: ast.arguments) -> str:
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


@pytest.mark.parametrize("name", SIGNATURES)
def test_recorded_signatures_are_those_of_the_source(name):
    recorded = SIGNATURES[name]
    file = source_of(recorded["file"])
    if file is None:
        pytest.skip(f"not run: {recorded['file']} is not here (set {SOURCES})")
    found = signatures_in(file, name.rpartition(".")[2])
    assert {key: bare(parsed(recorded[key])) for key in found} == found


def parsed(parameters: str) -> ast.arguments:
    return ast.parse(f"def made({parameters}): pass").body[0].args  # type: ignore[attr-defined,no-any-return]


def test_a_signature_that_changed_is_found(tmp_path):
    (tmp_path / "there.py").write_text("class A:\n def __init__(self, a: int = 1): ...\n"
                                       " def plan(self, *b): ...\n def run(self): ...\n")  # fmt: skip
    assert signatures_in(tmp_path / "there.py", "A") == {"parameters": "self, a=1", "plan": "self, *b", "run": "self"}


def attended(q: Any, k: Any, v: Any, lens: Any, starts: Any, tables: Any, scale: float, left: int = -1) -> Any:
    """Paged attention in float32: q `[T, H, d]`, k and v `[blocks, 64, G, d]`."""
    out = q.new_full((*q.shape[:2], v.shape[-1]), torch.nan)
    for i, n in enumerate(lens.tolist()):
        a, b = int(starts[i]), int(starts[i + 1])
        keys, values = (t[tables[i].long()].flatten(0, 1)[:n].float() for t in (k, v))
        group = q.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        s = torch.einsum("qhd,khd->hqk", q[a:b].float(), keys) * scale
        late = torch.arange(n)[None] - torch.arange(n - b + a, n)[:, None]
        hidden = (late > 0) | ((late < -left) if left >= 0 else torch.zeros_like(late, dtype=torch.bool))
        out[a:b] = torch.einsum("hqk,khd->qhd", s.masked_fill(hidden, -torch.inf).softmax(-1), values).to(q.dtype)
    return out


def flash_mla(given: dict[str, Any]) -> Any:
    g = SimpleNamespace(**given)
    b, m, h, d = g.q.shape
    assert (
        d == 576 and g.head_dim_v == 512 and g.k_cache.shape[1:] == (64, 1, 576) and g.causal and g.num_splits is None
    )
    assert g.block_table.dtype == g.cache_seqlens.dtype == torch.int32
    out = torch.full((b * m, h, 512), torch.nan, dtype=g.q.dtype)
    for i, n in enumerate(g.cache_seqlens.tolist()):  # rows that stand before a sequence's first key see none
        few = min(m, n)
        table, rows = g.block_table[i : i + 1], slice((i + 1) * m - few, (i + 1) * m)
        starts, lens = torch.tensor([0, few]), torch.tensor([n])
        q = g.q[i, m - few :]
        out[rows] = attended(q, g.k_cache, g.k_cache[..., :512], lens, starts, table, g.softmax_scale)
    return out.view(b, m, h, 512), None


def flash_attn(given: dict[str, Any]) -> Any:
    g = SimpleNamespace(**given)
    assert g.causal and g.max_seqlen_q >= 1 and g.k_cache.stride(-1) == g.v_cache.stride(-1) == 1
    assert g.page_table.dtype == g.cache_seqlens.dtype == g.cu_seqlens_q.dtype == torch.int32
    q = g.q if g.qv is None else torch.cat((g.qv, g.q), -1)
    k = g.k_cache if g.qv is None else torch.cat((g.v_cache, g.k_cache), -1)
    left = g.window_size[0]
    return attended(q, k, g.v_cache, g.cache_seqlens, g.cu_seqlens_q, g.page_table, g.softmax_scale, left)


def flash_mla_sparse(given: dict[str, Any]) -> Any:
    g = SimpleNamespace(**given)
    tokens, heads, _ = g.q.shape
    assert heads in (64, 128) and g.kv.shape[1:] == (1, 576) and g.d_v == 512 and g.q.is_contiguous()
    assert g.indices.dtype == torch.int32 and g.indices.shape[:2] == (tokens, 1) and g.indices.shape[2] % 128 == 0
    out = torch.full((tokens, heads, 512), torch.nan, dtype=g.q.dtype)
    for i, row in enumerate(g.indices[:, 0].tolist()):
        keys = g.kv[[slot for slot in row if 0 <= slot < g.kv.shape[0]], 0].float()
        out[i] = ((g.q[i].float() @ keys.t()) * g.sm_scale).softmax(-1) @ keys[:, :512]
    return out, None, None


class Planned:
    """FlashInfer's wrappers: what `plan` was given, and then `run`."""

    def planned(self, given: dict[str, Any]) -> None:
        self.given = SimpleNamespace(**given)

    def tables(self, starts: Any, blocks: Any) -> Any:
        most = int((starts[1:] - starts[:-1]).max())
        rows = [blocks[a:b].tolist() for a, b in itertools.pairwise(starts)]
        return torch.tensor([row + [0] * (most - len(row)) for row in rows])


def flashinfer_modules() -> dict[str, ModuleType]:
    root, mla = ModuleType("flashinfer"), ModuleType("flashinfer.mla")

    def run_paged(given: dict[str, Any]) -> Any:
        p, (k, v) = given["self"].given, given["paged_kv_cache"]
        starts = p.paged_kv_indptr
        counts = starts[1:] - starts[:-1]
        lens = torch.where(counts > 0, (counts - 1) * p.page_size + p.paged_kv_last_page_len, 0)
        tables = given["self"].tables(starts, p.paged_kv_indices)
        assert p.causal and (p.num_qo_heads, p.num_kv_heads, p.head_dim_qk) == (given["q"].shape[1], *k.shape[2:])
        return attended(given["q"], k, v, lens, p.qo_indptr, tables, p.sm_scale)

    def run_latent(given: dict[str, Any]) -> Any:
        p, latent = given["self"].given, given["ckv_cache"][:, :, None]
        k = torch.cat((latent, given["kpe_cache"][:, :, None]), -1)
        q = torch.cat((given["q_nope"], given["q_pe"]), -1)
        tables = given["self"].tables(p.kv_indptr, p.kv_indices)
        assert p.causal and (p.head_dim_ckv, p.head_dim_kpe, p.page_size) == (512, 64, 64)
        return attended(q, k, latent, p.kv_len_arr, p.qo_indptr, tables, p.sm_scale)

    for module, name, run in ((root, "BatchPrefillWithPagedKVCacheWrapper", run_paged),
                              (mla, "BatchMLAPagedAttentionWrapper", run_latent)):  # fmt: skip
        path = f"{module.__name__}.{name}"
        planned = published(path, lambda given: Planned.planned(given.pop("self"), given), "plan")
        members = {"__init__": published(path, lambda given: None), "plan": planned, "run": published(path, run, "run")}
        setattr(module, name, type(name, (Planned,), members))
    root.mla = mla  # type: ignore[attr-defined]
    return {"flashinfer": root, "flashinfer.mla": mla}


@pytest.fixture
def libraries(monkeypatch):
    """All three in place of what is not installed."""
    mla, attn = ModuleType("flash_mla"), ModuleType("flash_attn_interface")
    mla.get_mla_metadata = published("flash_mla.get_mla_metadata", lambda given: ("plan", None))  # type: ignore[attr-defined]
    mla.flash_mla_with_kvcache = published("flash_mla.flash_mla_with_kvcache", flash_mla)  # type: ignore[attr-defined]
    mla.flash_mla_sparse_fwd = published("flash_mla.flash_mla_sparse_fwd", flash_mla_sparse)  # type: ignore[attr-defined]
    attn.flash_attn_with_kvcache = published("flash_attn_interface.flash_attn_with_kvcache", flash_attn)  # type: ignore[attr-defined]
    for name, module in {"flash_mla": mla, "flash_attn_interface": attn, **flashinfer_modules()}.items():
        monkeypatch.setitem(sys.modules, name, module)


DIMS = MLADims(4, 128, 64, 128, 512)
GQA, WINDOW = KVRequest("gqa", 2, 64, 64), KVRequest("gqa", 2, 64, 64, window=20)
OPS = {
    "latent": MLAAbsorbed(placeholder(4 * 256, 512), DIMS, 192**-0.5, DIMS.request),
    "sparse": SparseMLAAbsorbed(placeholder(4 * 256, 512), DIMS, 192**-0.5, DIMS.request, 128),
    "sparse_many": SparseMLAExpanded(Linear(placeholder(4 * 256, 512)), DIMS, 192**-0.5, DIMS.request, 128),
    "few": Attention(4, 0.125, GQA, "few"),
    "many": Attention(4, 0.125, GQA, "many"),
    "window": Attention(4, 0.125, WINDOW, "few"),
}
STEPS = {"even": [(2, 60), (2, 130)], "drafts": [(1, 0), (3, 64), (2, 127)], "chunks": [(40, 0), (30, 100)]}


def sample(op: Any, sequences: list[tuple[int, int]]) -> Sample:
    def inputs(draw: Any) -> tuple[Any, ...]:
        batch, kv = draw.step(op.kv, sequences, written=True)
        if op.name == "attention":
            return draw.normal(batch.tokens, op.heads, op.kv.dim), batch, kv
        chosen = (draw_positions(draw, batch, op.top),) if op.name.startswith("sparse") else ()
        return draw.normal(batch.tokens, 4, 192)[..., :128], draw.normal(batch.tokens, 4, 64), *chosen, batch, kv

    return Sample("made", op, inputs, "mixed" if sequences[0][0] > 8 else "decode")


def calls() -> list[Any]:
    pairs = [(op, steps) for op in OPS for steps in STEPS if op.endswith("many") == (steps == "chunks")]
    return [(k, *pair) for k in providers.kernels() for pair in pairs if OPS[pair[0]].name == k.op]


@pytest.mark.parametrize(("kernel", "op", "steps"), calls(), ids=str)
def test_calls_mean_what_the_op_means(libraries, kernel, op, steps, record_property):
    made = sample(OPS[op], STEPS[steps])
    bench = Bench("described", HOST, torch.bfloat16, FEATURES, lambda request: list_paged_layouts())
    outcome = run_case(kernel, made, bench, poisoned=True)
    assert outcome.served == (op != "window"), outcome.detail
    if outcome.served:
        record_property("op", kernel.op)
        record_property("error", outcome.error)
        record_property("tolerance", outcome.tolerance)
        assert outcome.passed, f"{outcome.error} > {outcome.tolerance} {outcome.detail}\n{outcome.traceback}"


def test_a_library_that_takes_something_else_is_refused(libraries, monkeypatch):
    monkeypatch.setattr(sys.modules["flash_mla"], "flash_mla_with_kvcache", lambda q, kv: None)
    with pytest.raises(KernelError, match=r"flash_mla.flash_mla_with_kvcache does not take k_cache, block_table"):
        importlib.import_module(f"{providers.FOLDER}.flash_mla").prepare(None, None)
    monkeypatch.delattr(sys.modules["flash_mla"], "get_mla_metadata")
    with pytest.raises(KernelError, match=r"flash_mla.get_mla_metadata cannot be used \(AttributeError"):
        importlib.import_module(f"{providers.FOLDER}.flash_mla").prepare(None, None)


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (None, "", "flashinfer is not installed (pip install"),
        ("flashinfer", "0.5.9", "flashinfer-python 0.5.9 is here; known are 0.6 up to, not with, 0.7"),
        ("flashinfer", "0.6.3.post1+cu130", "flashinfer-python 0.6.3.post1+cu130"),
        ("flashinfer", "0.7.2", "flashinfer-python 0.7.2 is here; known are"),
    ],
)
def test_the_reason_is_told(monkeypatch, here, there, words):
    monkeypatch.setattr(providers, "is_installed", lambda module: module == here)
    monkeypatch.setattr(providers, "version_of", lambda name: there)
    feature = providers.LIBRARIES["flashinfer"].feature()
    assert feature.reason.startswith(words) and feature.present == (there == "0.6.3.post1+cu130")


def test_what_was_measured_to_be_the_fastest_is_taken(tmp_path, monkeypatch):
    rows = [
        {"shape": "a", "kernel": "triton:mla_absorbed whole op", "kv": "auto", "us": 20.0},
        {"shape": "a", "kernel": "gluon:mla_absorbed whole op", "kv": "auto", "us": 10.0},
        {"shape": "b", "kernel": "triton:mla_absorbed whole op", "kv": "auto", "us": 30.0},
        {"shape": "b", "kernel": "gluon:mla_absorbed whole op", "kv": "auto", "us": 40.0},
        {"shape": "b", "kernel": "gluon:attend", "kv": "auto", "us": 1.0},
        {"shape": "b", "kernel": "gluon:mla_absorbed whole op", "kv": "fp8", "us": 999.0},
        {"shape": "b", "kernel": "flash_mla:mla_absorbed whole op", "kv": "auto", "error": "RuntimeError: no"},
    ]
    assert find_fastest(rows) == {"gluon:mla_absorbed"}
    file = tmp_path / "gpu-check.json"
    file.write_text(json.dumps({"parts": {"mla": rows, "conformance": {"results": []}}}))
    monkeypatch.setenv(TUNING_VARIABLE, str(file))
    ranks = {k.name: k.rank for k in rank_measured(hopper_kernels(), load_measured())}
    assert ranks["gluon:mla_absorbed"] == 90 and ranks["gluon:mla_expanded"] == 40
    file.write_text("[]")
    with pytest.raises(UsageError, match="INFERPLANE_CUDA_TUNING"):
        load_measured()

"""Two processes that share a model, over gloo: the answers of one process, half of its weights each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from inferplane import LLM
from inferplane.cli import main
from inferplane.models import Build, Config, build
from inferplane.types import Placement
from tests.e2e.drafters import noisy_copy
from tests.e2e.processes import heeding_ctrl_c, kill, wait_for_output
from tests.e2e.sharing import answers, share
from tests.e2e.tiny_models import make

ROOT = Path(__file__).parents[2]
CASES = [
    "llama-gqa",
    "llama-attention_bias",
    "qwen3_moe-plain",
    "deepseek-q_lora",
    "deepseek_v2-groups",
]
FLOAT32 = 1e-5
SECONDS = 240


def torchrun(*words, node=(), prefix=(), **options):
    """The launcher, in a process group of its own."""
    node = node or ("--standalone", "--nproc-per-node", "2")
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *node, *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with heeding_ctrl_c():
        return subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **pipes, **options)


def done(process, code=0):
    """Its output; it must end by itself, and leave nobody behind."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it hangs\n{kill(process)}") from None
    assert code is None or process.returncode == code, err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return out, err


def same(got, want):
    assert got["tokens"] == want["tokens"] == got["again"] and all(len(t) == 64 for t in got["tokens"])
    for g, w in zip(got["logits"], want["logits"], strict=True):
        assert g.shape == w.shape and (g - w).abs().max() <= FLOAT32 * w.abs().max()
    assert (got["vectors"] - want["vectors"]).abs().max() <= FLOAT32 * want["vectors"].abs().max()


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_answer_as_one(case, tmp_path):
    make(*case.split("-"), tmp_path / "model")
    with LLM(tmp_path / "model", device="cpu", dtype="float32", max_num_seqs=3, max_num_batched_tokens=48) as llm:
        want, whole = answers(llm), llm.runner.loaded.nbytes
    share(tmp_path / "model", tmp_path / "out", seconds=SECONDS)
    got = torch.load(tmp_path / "out")
    same(got, want)
    one, *both = (
        {path: w for path, w in build(Build(config, p, positions=config.positions)).weights()}
        for config in [Config.read(tmp_path / "model")]
        for p in (Placement(), Placement.shared(0, 2), Placement.shared(1, 2))
    )
    for mine, tree in zip(got["bytes"], both, strict=True):
        own = {id(w): (one[path], w) for path, w in tree.items()}.values()
        assert mine == sum(w.nbytes(torch.float32) for _, w in own), "it reads what it declares"
        copied = sum(w.nbytes(torch.float32) for w, part in own if part.shape == w.shape)
        heads = [(w, part) for w, part in own if w.shape[0] < 2 * part.shape[0] and w.shape[0] != part.shape[0]]
        assert bool(heads) == (case == "llama-attention_bias"), "only one KV head is on both"
        more = sum(part.nbytes(torch.float32) - w.nbytes(torch.float32) / 2 for w, part in heads)
        assert mine <= (whole - copied) / 2 + copied + more
        print(f"{case}: {whole} bytes on one rank, {mine} of two, {copied} of them on both")


@pytest.mark.parametrize("case", ["llama-gqa", "qwen3_moe-plain"])
def test_two_ranks_launch_the_next_step_while_one_runs(case, tmp_path):
    """The newest tokens go from device to device; blocks are few, so that some steps wait."""
    make(*case.split("-"), tmp_path / "model")
    plain = {"device": "cpu", "dtype": "float32", "max_num_seqs": 3, "max_num_batched_tokens": 48}
    with LLM(tmp_path / "model", **plain) as llm:
        want = answers(llm)
    share(tmp_path / "model", tmp_path / "out", json.dumps({"async_scheduling": "on"}), seconds=SECONDS)
    got = torch.load(tmp_path / "out")
    same(got, want)
    assert got["overlapped"] > 100 and set(got["waits"]) <= {"pooling", "blocks"}


def test_a_draft_model_of_rank_0_alone(tmp_path):
    """The same tokens as without drafts, in fewer steps; the other rank has no bytes of the draft model."""
    make("llama", "gqa", tmp_path / "model")
    noisy_copy(tmp_path / "model", tmp_path / "draft", noise=0.02)
    plain = {"device": "cpu", "dtype": "float32", "max_num_seqs": 3, "max_num_batched_tokens": 48}
    with LLM(tmp_path / "model", **plain) as llm:
        want = answers(llm)
    drafting = {
        "method": "draft_model",
        "num_speculative_tokens": 2,
        "model": str(tmp_path / "draft"),
    }
    words = (tmp_path / "model", tmp_path / "out", json.dumps({"speculative_config": drafting}))
    share(*words, seconds=SECONDS)
    got = torch.load(tmp_path / "out")
    same(got, want)
    assert got["bytes"][0] == got["bytes"][1], "of the model alone"
    assert got["accepted"] > 50, "drafts stood"


def test_the_command_line(capsys, monkeypatch):
    words = ("generate", "demo", "--device", "cpu", "-p", "def main():", "--max-tokens", "24", "--temperature", "0")
    out, err = done(torchrun("-m", "inferplane", *words))
    monkeypatch.setattr(main, "prepare", lambda environment: None)
    assert main.main([*words]) == 0
    assert out == capsys.readouterr().out and out.strip()
    assert err.count("tokens/s") <= 1


def test_what_two_ranks_cannot_share(tmp_path):
    make("llama", "odd", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "core" / "inferplane" / "models" / "demo" / name, tmp_path / "model")
    _, err = done(torchrun("-m", "inferplane", "generate", tmp_path / "model", "--device", "cpu", "-p", "x"), code=1)
    assert "vocab_size = 101 cannot be shared equally by 2 ranks" in err or "num_attention_heads = 5 cannot" in err


def test_a_rank_that_is_killed_ends_the_others(tmp_path):
    """Rank 0's requests end with an error, and nothing hangs."""
    process = torchrun("tests/e2e/lost.py")
    wait_for_output(process, SECONDS)
    pid = int(process.stdout.readline())
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    done(process, code=1)
    assert time.monotonic() - began < 60


def test_ctrl_c_ends_all_ranks(tmp_path):
    process = torchrun("tests/e2e/lost.py")
    wait_for_output(process, SECONDS)
    assert process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    done(process, code=None)


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_to_rank_0_ends_both_without_our_traceback(number):
    """The launcher has words of its own."""
    words = ("generate", "--device", "cpu", "-p", "def f(", "--max-tokens", "1500", "--temperature", "1.5")
    _, err = done(torchrun("tests/e2e/interrupted.py", number, "step:5", *words), code=1)
    assert "core/inferplane" not in err and "KeyboardInterrupt" not in err, err
    assert "local_rank: 0" in err or "rank      : 0" in err, err


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("ip"), reason="not run: needs root and iproute2")
def test_two_machines(tmp_path):
    """Two network namespaces that see each other over one link only."""
    names = [f"inferplane-{os.getpid()}-{i}" for i in (0, 1)]
    links = [f"ip{os.getpid() % 10**6}{end}" for end in "ab"]

    def ip(*words, check=True):
        return subprocess.run(["ip", *words], check=check, capture_output=True, text=True)

    made = [ip("netns", "add", name, check=False) for name in names]
    try:
        if any(m.returncode for m in made):
            pytest.skip(f"not run: no network namespaces here ({made[0].stderr.strip()})")
        ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for i, (name, link) in enumerate(zip(names, links)):
            ip("-n", name, "address", "add", f"10.9.0.{i + 1}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        make("deepseek", "q_lora", tmp_path / "model")
        with LLM(tmp_path / "model", device="cpu", dtype="float32", max_num_seqs=3, max_num_batched_tokens=48) as llm:
            want = answers(llm)
        nodes = []
        for i, (name, link) in enumerate(zip(names, links)):
            node = ("--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(i))
            node += ("--master-addr", "10.9.0.1", "--master-port", "29577")
            prefix = ("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME={link}")
            words = ("tests/e2e/sharing.py", tmp_path / "model", tmp_path / "out")
            nodes.append(torchrun(*words, node=node, prefix=prefix))
        for node in nodes:
            done(node)
        same(torch.load(tmp_path / "out"), want)
    finally:
        for name in names:
            ip("netns", "delete", name, check=False)

"""The demo model's training loop: Muon and AdamW against a budget, resumable."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from demo_check import evaluate
from demo_data import Batches, Dataset
from demo_format import dequantize_blocks, quantize_blocks
from demo_model import Config, Model, MoE, UsageError
from torch import Tensor, nn


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """g [..., n, k] -> a matrix near U V^T of each g = U S V^T, by a quintic Newton-Schulz iteration in bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) * 1.01 + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, orthogonalized, for stacks of matrices; float32 masters of bfloat16 parameters [..., n, k]."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95):
        self.params, self.momentum = params, momentum
        self.masters = [p.detach().float().clone() for p in params]
        self.buffers = [torch.zeros_like(m) for m in self.masters]
        self.groups: dict[tuple[int, ...], list[int]] = {}
        for i, p in enumerate(params):
            self.groups.setdefault(tuple(p.shape[-2:]), []).append(i)

    @torch.no_grad()
    def step(self, lr: float, decay: float) -> None:
        """One update of the masters; `publish` hands them to the parameters."""
        for (n, k), members in self.groups.items():
            updates = []
            for i in members:
                grad = self.params[i].grad
                assert grad is not None, "every matrix takes part in every step"
                g = grad.float()
                self.buffers[i].lerp_(g, 1 - self.momentum)
                updates.append(g.lerp(self.buffers[i], self.momentum).reshape(-1, n, k))
                self.params[i].grad = None
            directions = orthogonalize(torch.cat(updates)).split([u.shape[0] for u in updates])
            scale = lr * math.sqrt(max(1.0, n / k))
            for i, direction in zip(members, directions, strict=True):
                master = self.masters[i]
                master.mul_(1 - lr * decay).sub_(direction.float().view_as(master), alpha=scale)

    @torch.no_grad()
    def publish(self, fp8: bool) -> None:
        """Copy the masters to the parameters, rounded through FP8 first if asked (straight-through training)."""
        for param, master in zip(self.params, self.masters, strict=True):
            if not fp8:
                param.copy_(master)
                continue
            for p, m in zip(param.view(-1, *param.shape[-2:]), master.view(-1, *master.shape[-2:]), strict=True):
                p.copy_(dequantize_blocks(*quantize_blocks(m)))

    def state(self) -> dict[str, Any]:
        return {"masters": self.masters, "buffers": self.buffers}

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        for mine, theirs in zip(self.masters + self.buffers, state["masters"] + state["buffers"], strict=True):
            mine.copy_(theirs)


def is_muon(name: str) -> bool:
    """Whether a parameter is a hidden matrix (trained by Muon in bfloat16); the rest is AdamW's, in float32."""
    return name.endswith((".w13", ".w2", "_proj.weight", "_proj_with_mqa.weight"))


@dataclasses.dataclass
class Options:
    """Training options, see `--help`."""

    minutes: float = 10.0
    steps: int | None = None
    tokens_per_step: str = "0:4096,0.3:8192"
    micro_rows: int = 4096
    context: str = "0:256,0.35:512,0.75:1024,0.93:2048"
    muon_lr: float = 0.018
    adam_lr: float = 0.006
    embed_lr: float = 0.02
    weight_decay: float = 0.1
    warmup: float = 0.02
    cooldown: float = 0.85
    mtp_weight: float = 0.3
    bias_speed: float = 0.002
    fp8_from: float = 0.93
    seed: int = 1234
    threads: int = 1
    compile: bool = False
    checkpoint_minutes: float = 4.0
    eval_minutes: float = 5.0

    def check(self) -> None:
        """Raise a UsageError for values that no run can have."""
        for name in ("minutes", "steps", "micro_rows", "threads", "cooldown"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"--{name.replace('_', '-')} is {value}, it must be above zero")
        for name in ("context", "tokens_per_step"):
            schedule = getattr(self, name)
            try:
                valid = self.at(schedule, 0.0) > 0 and self.at(schedule, 1.0) > 0
            except ValueError:
                valid = False
            if not valid:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {schedule!r}, it must be progress:value pairs from progress 0 on, "
                    "like 0:256,0.5:512"
                )

    @staticmethod
    def at(schedule: str, progress: float) -> int:
        """The value in force at a progress of 0 .. 1 by a schedule like "0:256,0.5:512"."""
        current = 0
        for item in schedule.split(","):
            start, _, value = item.partition(":")
            if float(start) <= progress:
                current = int(value)
        return current

    def lr_factor(self, progress: float) -> float:
        """Warm-up, plateau, then linearly to zero over the last `cooldown` of the budget."""
        if progress < self.warmup:
            return max(progress / self.warmup, 0.02)
        return min(1.0, max(0.0, (1.0 - progress) / self.cooldown))


def float_copy(model: Model, muon: Muon) -> Model:
    """A float32 evaluation copy made of the optimizer's masters."""
    copy = Model(model.cfg)
    copy.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    names = {id(p): name for name, p in model.named_parameters()}
    mine = dict(copy.named_parameters())
    with torch.no_grad():
        for param, master in zip(muon.params, muon.masters, strict=True):
            mine[names[id(param)]].copy_(master)
    return copy.eval()


def save_atomically(obj: Any, path: Path) -> None:
    """torch.save that never leaves half a file."""
    part = path.with_suffix(".part")
    torch.save(obj, part)
    part.replace(path)


class Journal:
    """Lines of JSON on standard output and in a file."""

    def __init__(self, path: Path):
        self.file = path.open("a", encoding="utf-8")

    def note(self, **what: Any) -> None:
        """Write one line; floats to four places."""
        line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in what.items()})
        print(line, flush=True)
        self.file.write(line + "\n")
        self.file.flush()


class Trainer:
    """A model, its optimizers and the position in data and budget; `save` and `load` keep all of it."""

    def __init__(self, cfg: Config, opt: Options, data: Dataset):
        self.cfg, self.opt = cfg, opt
        self.model = Model(cfg, opt.seed)
        named = list(self.model.named_parameters())
        for name, param in named:
            if is_muon(name):
                param.data = param.data.bfloat16()
        self.muon = Muon([p for name, p in named if is_muon(name)])
        small = [p for name, p in named if not is_muon(name) and name != "embed"]
        self.others = [self.model.embed, *small]
        groups = [{"params": [self.model.embed], "peak": opt.embed_lr}, {"params": small, "peak": opt.adam_lr}]
        self.adam = torch.optim.AdamW(groups, lr=opt.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.files = data.train
        self.batches = Batches(self.files, opt.seed)
        self.moes = [m for m in self.model.modules() if isinstance(m, MoE)]
        self.step, self.seen, self.elapsed = 0, 0, 0.0
        if opt.compile:  # one graph for each kind of layer and context; the default limit falls back silently
            torch._dynamo.config.recompile_limit = 64
        self.losses = torch.compile(self.model.losses, dynamic=False) if opt.compile else self.model.losses

    def load(self, path: Path) -> None:
        """Go on from a checkpoint of `save`."""
        saved = torch.load(path, weights_only=True)
        if saved["config"] != dataclasses.asdict(self.cfg):
            raise UsageError(f"{path} is of another model size: use another --work folder or leave out --resume")
        self.model.load_state_dict(saved["model"])
        self.muon.load(saved["muon"])
        self.adam.load_state_dict(saved["adam"])
        self.step, self.seen, self.elapsed = saved["step"], saved["seen"], saved["elapsed"]
        self.batches = Batches(self.files, self.opt.seed, saved["taken"])

    def facts(self) -> dict[str, Any]:
        """What both kinds of file say about the run."""
        return {
            "config": dataclasses.asdict(self.cfg),
            "options": dataclasses.asdict(self.opt),
            "step": self.step,
            "seen": self.seen,
            "elapsed": self.elapsed,
        }

    def save(self, path: Path) -> None:
        """A checkpoint to go on from."""
        state = {"model": self.model.state_dict(), "muon": self.muon.state(), "adam": self.adam.state_dict()}
        save_atomically({**self.facts(), **state, "taken": self.batches.taken}, path)

    def advance(self, progress: float) -> tuple[float, float]:
        """One optimizer step at a progress of 0 .. 1; the losses of the main model and of MTP, nats/token."""
        opt = self.opt
        context = Options.at(opt.context, progress)
        rows = max(1, opt.micro_rows // context)
        micros = max(1, round(Options.at(opt.tokens_per_step, progress) / (rows * context)))
        totals = [0.0, 0.0]
        for _ in range(micros):
            window = self.batches.take(rows, context + 2)
            main, ahead = self.losses(window, torch.bfloat16, opt.mtp_weight > 0)
            ((main + opt.mtp_weight * ahead) / micros).backward()
            totals[0] += main.item() / micros
            totals[1] += ahead.item() / micros
            self.seen += rows * context
        factor = opt.lr_factor(progress)
        for group in self.adam.param_groups:
            group["lr"] = group["peak"] * factor
        self.muon.step(opt.muon_lr * factor, opt.weight_decay)
        self.muon.publish(fp8=progress >= opt.fp8_from)
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for moe in self.moes:
            moe.update_bias(opt.bias_speed * factor)
        self.step += 1
        return totals[0], totals[1]


def train(cfg: Config, opt: Options, work: Path, resume: bool) -> None:
    """Train to the end of the budget; writes work/last.pt (resumable), work/final.pt and work/log.jsonl."""
    torch.set_num_threads(opt.threads)
    work.mkdir(parents=True, exist_ok=True)
    data = Dataset.build(cfg.vocab_size)
    (work / "tokenizer.json").write_text(data.tokenizer.to_str(), encoding="utf-8")
    run, journal, last = Trainer(cfg, opt, data), Journal(work / "log.jsonl"), work / "last.pt"
    if resume and last.exists():
        run.load(last)
    journal.note(
        event="start",
        parameters=sum(p.numel() for p in run.model.parameters()),
        train_tokens=sum(map(len, data.train)),
        step=run.step,
    )
    started = time.monotonic() - run.elapsed
    saved = measured = run.elapsed
    logged, mean = (run.seen, run.elapsed), 0.0
    run.model.train()
    while (progress := run.step / opt.steps if opt.steps else run.elapsed / (60 * opt.minutes)) < 1:
        main, ahead = run.advance(progress)
        mean = 0.95 * mean + 0.05 * main if mean else main
        run.elapsed = now = time.monotonic() - started
        if run.step % 50 == 0:
            journal.note(
                step=run.step,
                seconds=round(now),
                loss=mean,
                mtp=ahead,
                lr=opt.lr_factor(progress),
                tokens_per_second=round((run.seen - logged[0]) / (now - logged[1])),
                context=Options.at(opt.context, progress),
                epochs=run.seen / len(run.batches.stream),
            )
            logged = (run.seen, now)
        if now >= measured + 60 * opt.eval_minutes:
            context = Options.at(opt.context, progress)
            result = evaluate(run.model, data.held, context, torch.bfloat16, limit=20_000)
            journal.note(event="held-out", step=run.step, seen=run.seen, **result)
            measured = now
        if now >= saved + 60 * opt.checkpoint_minutes:
            run.save(last)
            saved = now
    run.save(last)
    final = float_copy(run.model, run.muon)
    save_atomically({**run.facts(), "state": final.state_dict()}, work / "final.pt")
    result = evaluate(final, data.held, Options.at(opt.context, 1.0), torch.float32, limit=40_000)
    journal.note(event="end", step=run.step, seen=run.seen, minutes=run.elapsed / 60, **result)

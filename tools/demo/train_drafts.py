#!/usr/bin/env python3
"""Train, export and check what drafts for the demo model: a small Llama and an EAGLE head.

Both learn from the demo model itself, on the text it was trained on: the Llama its distributions, the head its
distributions and its hidden states. They are shipped in subfolders of the demo model, in FP8 as it is.

    python tools/demo/train_drafts.py train eagle --minutes 20   # train, then export into the work folder
    python tools/demo/train_drafts.py train draft --minutes 20
    python tools/demo/train_drafts.py export eagle --out FOLDER  # export the work folder's finished run
    python tools/demo/train_drafts.py eval draft                 # recompute the held-out agreement of the shipped one

A budget in minutes makes the schedule, and so the weights, depend on the machine's speed; `--steps` does not. The
shipped folders' options are in their training.json.

Sources: EAGLE (arXiv:2401.15077), HASS (arXiv:2408.15766) for `--unroll`; distillation as in arXiv:1503.02531.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from demo_data import Batches, dataset_of
from demo_export import DEFAULT_OUT
from demo_format import load_folder
from demo_model import Model, UsageError
from draft_format import export, load_drafter, make_drafter
from draft_model import DraftConfig, DraftLM, EagleHead, agreement
from torch import Tensor
from train_loop import Journal, Muon, is_muon, save_atomically

DEFAULT_WORK = Path(tempfile.gettempdir()) / "demo-drafts"
KINDS = ("draft", "eagle")


@dataclasses.dataclass
class DraftOptions:
    """Training options, see `--help`."""

    minutes: float = 20.0
    steps: int | None = None
    rows: int = 4096
    context: int = 512
    layers: int = 2
    unroll: int = 2
    feature_weight: float = 0.5
    muon_lr: float = 0.02
    adam_lr: float = 0.004
    embed_lr: float = 0.004
    weight_decay: float = 0.1
    warmup: float = 0.02
    cooldown: float = 0.7
    fp8_from: float = 0.9
    seed: int = 1234
    threads: int = 1

    def check(self) -> None:
        """Raise a UsageError for values that no run can have."""
        for name in ("minutes", "steps", "rows", "context", "layers", "unroll", "threads", "cooldown"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"--{name.replace('_', '-')} is {value}, it must be above zero")

    def lr_factor(self, progress: float) -> float:
        """Warm-up, plateau, then linearly to zero over the last `cooldown` of the budget."""
        if progress < self.warmup:
            return max(progress / self.warmup, 0.02)
        return min(1.0, max(0.0, (1.0 - progress) / self.cooldown))


def teacher_of(folder: Path, dtype: torch.dtype) -> Model:
    """The demo model, its matrices in `dtype`, not to be trained."""
    return frozen(load_folder(folder)[1], dtype)


def frozen(teacher: Model, dtype: torch.dtype) -> Model:
    """A model that is not trained, its matrices in `dtype`."""
    teacher.requires_grad_(False)
    for name, param in teacher.named_parameters():
        if is_muon(name) or name.endswith("eh_proj.weight"):
            param.data = param.data.to(dtype)
    return teacher.eval()


def is_matrix(name: str) -> bool:
    """Whether a parameter is a hidden matrix, trained by Muon in bfloat16."""
    return is_muon(name) or name == "fc.weight"


class DraftTrainer:
    """A drafter, its teacher and its optimizers.

    Args:
        earlier: what `facts` said of a finished run, whose weights and place in the text are gone on from; the
            optimizers start anew.
    """

    def __init__(
        self,
        kind: str,
        opt: DraftOptions,
        teacher: Model,
        files: list[np.ndarray],
        earlier: dict[str, Any] | None = None,
    ):
        self.kind, self.opt, self.teacher = kind, opt, teacher
        self.stages: list[dict[str, Any]] = earlier["stages"] if earlier is not None else []
        cfg = DraftConfig(
            vocab_size=teacher.cfg.vocab_size,
            hidden_size=teacher.cfg.hidden_size,
            num_hidden_layers=opt.layers if kind == "draft" else 1,
            max_position_embeddings=teacher.cfg.max_position_embeddings,
        )
        self.model = make_drafter(kind, cfg, opt.seed)
        self.model.start_from(teacher)
        if earlier is not None:
            if earlier["config"] != dataclasses.asdict(cfg):
                raise UsageError("the finished run is of another size: use another --work folder or leave out --go-on")
            self.model.load_state_dict(earlier["state"])
        named = list(self.model.named_parameters())
        for name, param in named:
            if is_matrix(name):
                param.data = param.data.bfloat16()
        self.muon = Muon([p for name, p in named if is_matrix(name)])
        small = [p for name, p in named if not is_matrix(name) and name != "embed"]
        groups: list[dict[str, Any]] = [{"params": small, "peak": opt.adam_lr}]
        if isinstance(self.model, DraftLM):
            groups.append({"params": [self.model.embed], "peak": opt.embed_lr})
        self.others = [p for g in groups for p in g["params"]]
        self.adam = torch.optim.AdamW(groups, lr=opt.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        self.batches = Batches(files, opt.seed, earlier["taken"] if earlier is not None else 0)
        self.step, self.seen = 0, 0

    def losses(self, window: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.model, EagleHead):
            opt = self.opt
            return self.model.losses(self.teacher, window, torch.bfloat16, opt.unroll, opt.feature_weight)
        return self.model.losses(self.teacher, window, torch.bfloat16)

    def advance(self, progress: float) -> tuple[float, float]:
        """One optimizer step at a progress of 0 .. 1; the token and the feature loss."""
        opt, factor = self.opt, self.opt.lr_factor(progress)
        rows = max(1, opt.rows // opt.context)
        token, feature = self.losses(self.batches.take(rows, opt.context + 2))
        (token + feature).backward()
        self.seen += rows * opt.context
        for group in self.adam.param_groups:
            group["lr"] = group["peak"] * factor
        self.muon.step(opt.muon_lr * factor, opt.weight_decay)
        self.muon.publish(fp8=progress >= opt.fp8_from)
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.step += 1
        return token.item(), feature.item()

    def facts(self, elapsed: float) -> dict[str, Any]:
        """What a finished run leaves: weights, place in the text, and how it was trained, stage by stage."""
        stage = {"steps": self.step, "tokens": self.seen, "minutes": round(elapsed / 60, 1)}
        return {
            "kind": self.kind,
            "config": dataclasses.asdict(self.model.cfg),
            "stages": [*self.stages, {**stage, "options": dataclasses.asdict(self.opt)}],
            "taken": self.batches.taken,
            "state": self.finished().state_dict(),
        }

    def finished(self) -> DraftLM | EagleHead:
        """A float32 copy made of the optimizer's masters."""
        copy = make_drafter(self.kind, self.model.cfg)
        copy.load_state_dict({k: v.float() for k, v in self.model.state_dict().items()})
        names = {id(p): name for name, p in self.model.named_parameters()}
        mine = dict(copy.named_parameters())
        with torch.no_grad():
            for param, master in zip(self.muon.params, self.muon.masters, strict=True):
                mine[names[id(param)]].copy_(master)
        return copy.eval()


def finished_run(kind: str, work: Path) -> dict[str, Any]:
    """work/KIND.pt, as `train` left it."""
    source = work / f"{kind}.pt"
    if not source.exists():
        raise UsageError(f"{source} does not exist: run `train {kind}` with the same --work folder first")
    found: dict[str, Any] = torch.load(source, weights_only=True)
    return found


def train(kind: str, opt: DraftOptions, demo: Path, work: Path, go_on: bool = False) -> None:
    """Train to the end of the budget; writes work/KIND.pt and work/KIND.jsonl."""
    torch.set_num_threads(opt.threads)
    earlier = finished_run(kind, work) if go_on else None
    work.mkdir(parents=True, exist_ok=True)
    data = dataset_of(demo)
    run = DraftTrainer(kind, opt, teacher_of(demo, torch.bfloat16), data.train, earlier)
    journal = Journal(work / f"{kind}.jsonl")
    journal.note(event="start", kind=kind, parameters=sum(p.numel() for p in run.model.parameters()))
    started, mean, elapsed = time.monotonic(), 0.0, 0.0
    while (progress := run.step / opt.steps if opt.steps else elapsed / (60 * opt.minutes)) < 1:
        token, feature = run.advance(progress)
        mean = 0.95 * mean + 0.05 * token if mean else token
        elapsed = time.monotonic() - started
        if run.step % 25 == 0:
            rate = round(run.seen / elapsed)
            journal.note(step=run.step, seconds=round(elapsed), loss=mean, feature=feature, tokens_per_second=rate)
    save_atomically(run.facts(elapsed), work / f"{kind}.pt")
    journal.note(event="end", step=run.step, seen=run.seen, minutes=elapsed / 60)


def measure(drafter: DraftLM | EagleHead, demo: Path, context: int = 512, steps: int = 3) -> dict[str, Any]:
    """Held-out agreement with the demo model in float32, over a quarter of the held-out text."""
    held = torch.from_numpy(np.concatenate(dataset_of(demo).held).astype(np.int64))
    return {"context": context, **agreement(drafter, teacher_of(demo, torch.float32), held, context, steps, 40_000)}


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run; 0 done, 1 failed with one line of why, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=parser.formatter_class)
        sub.add_argument("kind", choices=KINDS, help="a small Llama, or an EAGLE head")
        sub.add_argument("--demo", type=Path, default=DEFAULT_OUT, help="the demo model, the teacher")
        return sub

    fit = command("train", "train within a budget, then export")
    for field, text in {
        "minutes": "wall-clock budget; the learning rate follows it",
        "rows": "tokens in one optimizer step",
        "context": "tokens of a training window",
        "layers": "layers of the small Llama",
        "unroll": "draft positions that the EAGLE head is trained for",
        "feature_weight": "weight of the EAGLE head's feature loss beside its token loss",
        "muon_lr": "peak learning rate of the hidden matrices (Muon)",
        "adam_lr": "peak learning rate of norms (AdamW)",
        "embed_lr": "peak learning rate of the small Llama's embedding (AdamW)",
        "weight_decay": "decoupled decay of the hidden matrices, times the learning rate",
        "warmup": "part of the budget in which the learning rate rises",
        "cooldown": "part of the budget in which it falls to zero",
        "fp8_from": "progress from which the forward pass uses FP8-rounded weights",
        "seed": "seed of weights and data order",
        "threads": "torch threads",
    }.items():
        default = getattr(DraftOptions, field)
        fit.add_argument("--" + field.replace("_", "-"), type=type(default), default=default, help=text)
    fit.add_argument("--steps", type=int, help="a budget in steps instead: repeatable whatever the machine's speed")
    fit.add_argument("--go-on", action="store_true", help="from the work folder's finished run, with a budget anew")
    ship = command("export", "export the finished run of the work folder")
    check = command("eval", "recompute the held-out agreement of an exported folder")
    check.add_argument("--model", type=Path, help="the exported folder; left out, the shipped one")
    for sub in (fit, ship):
        sub.add_argument("--work", type=Path, default=DEFAULT_WORK, help="runs and logs")
        # Not the shipped folder by default: trying the tool must not replace what the project ships.
        sub.add_argument("--out", type=Path, help="the exported folder; left out, WORK/KIND")
    args = parser.parse_args(argv)
    try:
        if args.command == "eval":
            drafter = load_drafter(args.kind, args.model or args.demo / args.kind)
            print(json.dumps(measure(drafter, args.demo), indent=2))
            return 0
        if args.command == "train":
            names = {f.name for f in dataclasses.fields(DraftOptions)}
            opt = DraftOptions(**{k: v for k, v in vars(args).items() if k in names})
            opt.check()
            train(args.kind, opt, args.demo, args.work, args.go_on)
        export(finished_run(args.kind, args.work), args.demo, args.out or args.work / args.kind, measure)
    except (UsageError, OSError) as error:
        print(f"train_drafts: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Give the demo model DeepSeek-V3.2's form: train a lightning indexer in each layer, then model and indexers together.

The shipped model stays DeepSeek-V3's; this makes a trained model of the newer form, to measure on what random
weights cannot show: how often rounded index keys change what a model says.

    python tools/demo/train_indexer.py train --warmup-steps 200 --sparse-steps 60   # then export into the work folder
    python tools/demo/train_indexer.py export --out FOLDER      # export the work folder's finished run
    python tools/demo/train_indexer.py eval --model FOLDER      # held-out loss, dense and sparse

The folder is in DeepSeek-V3.2's FP8 format. Source of both stages: its technical report (arXiv:2512.02556), section
2.1.1, with AdamW in both.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from demo_check import evaluate
from demo_data import Batches, dataset_of
from demo_export import DEFAULT_OUT, write_json
from demo_format import is_fp8, load_folder, quantize_blocks, read_folder
from demo_model import Config, Model, UsageError
from indexer_model import IndexConfig, SparseModel, Stage, go_sparse, to_hf, warm_up
from safetensors.torch import save_file
from torch import Tensor
from train_loop import Journal, save_atomically

DEFAULT_WORK = Path(tempfile.gettempdir()) / "demo-indexer"
RUN = "indexer.pt"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
EVAL_TOKENS = 40_000


@dataclasses.dataclass
class IndexerOptions:
    """Training options, see `--help`."""

    warmup_steps: int = 200
    sparse_steps: int = 60
    rows: int = 2048
    context: int = 1024
    top: int = 256
    heads: int = 4
    warmup_lr: float = 2e-3
    sparse_lr: float = 1e-4
    model_lr: float = 2e-5
    seed: int = 1234
    threads: int = 1

    def check(self) -> None:
        """Raise a UsageError for values that no run can have."""
        for name in ("warmup_steps", "rows", "context", "top", "heads", "threads"):
            if getattr(self, name) <= 0:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}, it must be above zero")
        if self.sparse_steps < 0:
            raise UsageError(f"--sparse-steps is {self.sparse_steps}, it must not be below zero")


class IndexerTrainer:
    """The model with its indexers, and their optimizers.

    Args:
        files: tokens of the training files.
    """

    def __init__(self, opt: IndexerOptions, model: Model, files: list[Any]):
        self.opt = opt
        self.sparse = SparseModel(model, IndexConfig(index_n_heads=opt.heads, index_topk=opt.top), opt.seed)
        self.batches = Batches(files, opt.seed)
        self.seen = 0

    def run(self, stage: Stage, steps: int, journal: Journal) -> None:
        """One stage: the learning rate falls linearly to a tenth."""
        opt, warm = self.opt, stage is warm_up
        own = {id(param) for param in self.sparse.indexers()}
        others = [param for param in self.sparse.parameters() if id(param) not in own]
        for param in others:
            param.requires_grad_(not warm)
        groups = [{"params": [*self.sparse.indexers()], "peak": opt.warmup_lr if warm else opt.sparse_lr}]
        if not warm:
            groups.append({"params": others, "peak": opt.model_lr})
        adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        started = time.monotonic()
        for step in range(steps):
            loss, divergence = stage(self.sparse, self.batches.take(max(1, opt.rows // opt.context), opt.context + 2))
            loss.backward()
            for group in adam.param_groups:
                group["lr"] = group["peak"] * (1 - 0.9 * step / steps) * min(1.0, (step + 1) / 10)
                torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            adam.step()
            adam.zero_grad(set_to_none=True)
            self.seen += max(1, opt.rows // opt.context) * opt.context
            if step % 10 == 9 or step == steps - 1:
                seconds = round(time.monotonic() - started)
                journal.note(
                    stage=stage.__name__, step=step + 1, seconds=seconds, loss=loss.item(), divergence=divergence.item()
                )

    def facts(self, minutes: float) -> dict[str, Any]:
        """What a finished run leaves."""
        return {
            "config": dataclasses.asdict(self.sparse.model.cfg),
            "index": dataclasses.asdict(self.sparse.index),
            "options": dataclasses.asdict(self.opt),
            "state": self.sparse.to_hf_state(),
            "seen": self.seen,
            "minutes": round(minutes, 1),
        }


def train(opt: IndexerOptions, demo: Path, work: Path) -> None:
    """Both stages; writes work/indexer.pt and work/indexer.jsonl."""
    torch.set_num_threads(opt.threads)
    work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    run = IndexerTrainer(opt, load_folder(demo)[1], dataset_of(demo).train)
    journal = Journal(work / "indexer.jsonl")
    run.run(warm_up, opt.warmup_steps, journal)
    run.run(go_sparse, opt.sparse_steps, journal)
    save_atomically(run.facts((time.monotonic() - started) / 60), work / RUN)


def stored_tensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The checkpoint's tensors as DeepSeek-V3.2's: FP8 blocks, the indexer's norm and its heads' weights in float32."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        is_own = ".indexer." in name
        if name.endswith((".indexer.wq_b.weight", ".indexer.wk.weight")) or (not is_own and is_fp8(name, value)):
            found[name], found[name + "_scale_inv"] = quantize_blocks(value)
        else:
            wide = is_own or name.endswith("e_score_correction_bias")
            found[name] = (value.float() if wide else value.bfloat16()).contiguous()
    return found


def export(demo: Path, work: Path, out: Path) -> None:
    """Write the Hugging Face folder of work/indexer.pt, and training.json with what it measures on held-out text.

    The files replace those of an earlier export only when all of them are there and measured.
    """
    source = work / RUN
    if not source.exists():
        raise UsageError(f"{source} does not exist: run `train` with the same --work folder first")
    saved = torch.load(source, weights_only=True)
    cfg, index = Config(**saved["config"]), IndexConfig(**saved["index"])
    new = work / "export"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    save_file(stored_tensors(saved["state"]), new / "model.safetensors", metadata={"format": "pt"})
    (new / "model.safetensors").chmod(0o644)  # safetensors keeps its files private
    write_json(new / "config.json", to_hf(cfg, index, fp8=True))
    for name in TEXT_FILES:
        shutil.copy(demo / name, new)
    facts = {
        "what": "Inferplane demo model in DeepSeek-V3.2's form, trained on Python's standard library",
        "held_out": measure(new, demo, saved["options"]["context"]),
        "tokens_seen": saved["seen"],
        "wall_minutes": saved["minutes"],
        "torch": torch.__version__,
        "options": saved["options"],
    }
    write_json(new / "training.json", facts)
    out.mkdir(parents=True, exist_ok=True)
    for path in new.iterdir():
        shutil.move(path, out / path.name)
    print(json.dumps(facts["held_out"], indent=2))


def load_indexed(folder: Path) -> SparseModel:
    """The model of an exported folder, float32.

    Raises:
        UsageError: the folder has no indexers.
    """
    hf, state = read_folder(folder)
    if not any(".indexer." in name for name in state):
        raise UsageError(f"{folder} holds no indexers: give --model a folder that this tool exported")
    index = IndexConfig(**{field.name: hf[field.name] for field in dataclasses.fields(IndexConfig)})
    return SparseModel.from_hf_state(Config.from_hf(hf), index, state)


def measure(folder: Path, demo: Path, context: int) -> dict[str, Any]:
    """Held-out losses of an exported folder: where queries read all tokens, and where they read what is chosen."""
    sparse, held = load_indexed(folder), dataset_of(demo).held
    found: dict[str, Any] = {"context": context}
    for name, top in (("dense", None), ("sparse", sparse.index.index_topk)):
        sparse.set_mode(top=top, learns=False)
        found[name] = evaluate(sparse.model, held, context, torch.float32, EVAL_TOKENS)
    return found


def main(argv: list[str] | None = None) -> int:
    """Parse the command line and run; 0 done, 1 failed with one line of why, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, formatter_class=parser.formatter_class)
        sub.add_argument("--demo", type=Path, default=DEFAULT_OUT, help="the model to begin with")
        return sub

    fit = command("train", "train both stages, then export")
    for field, text in {
        "warmup_steps": "steps in which the indexers alone learn, from attention over all tokens",
        "sparse_steps": "steps in which the model learns too, with attention over what is chosen",
        "rows": "tokens in one optimizer step",
        "context": "tokens of a training window",
        "top": "tokens that a query reads (index_topk)",
        "heads": "heads of an indexer",
        "warmup_lr": "peak learning rate of the indexers in the first stage",
        "sparse_lr": "the same in the second stage",
        "model_lr": "peak learning rate of the model in the second stage",
        "seed": "seed of weights and data order",
        "threads": "torch threads",
    }.items():
        default = getattr(IndexerOptions, field)
        fit.add_argument("--" + field.replace("_", "-"), type=type(default), default=default, help=text)
    ship = command("export", "export the finished run of the work folder")
    check = command("eval", "recompute the held-out losses of an exported folder")
    check.add_argument("--model", type=Path, default=DEFAULT_WORK / "model", help="the exported folder")
    check.add_argument("--context", type=int, default=IndexerOptions.context, help="tokens of a window")
    for sub in (fit, ship):
        sub.add_argument("--work", type=Path, default=DEFAULT_WORK, help="runs and logs")
        sub.add_argument("--out", type=Path, help="the exported folder; left out, WORK/model")
    args = parser.parse_args(argv)
    try:
        if args.command == "eval":
            print(json.dumps(measure(args.model, args.demo, args.context), indent=2))
            return 0
        if args.command == "train":
            names = {field.name for field in dataclasses.fields(IndexerOptions)}
            opt = IndexerOptions(**{k: v for k, v in vars(args).items() if k in names})
            opt.check()
            train(opt, args.demo, args.work)
        export(args.demo, args.work, args.out or args.work / "model")
    except (UsageError, OSError) as error:
        print(f"train_indexer: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

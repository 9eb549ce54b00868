"""Binding: turns a tree of ops and a device's kernels into plain functions over packed weights."""

from inferplane.binding.canary import Verdict, run_canary
from inferplane.binding.check import Bench, Outcome, run_case
from inferplane.binding.choice import Choice, Options, Rejection, reads_index_keys_alone
from inferplane.binding.explain import explain, explain_text
from inferplane.binding.link import View, link, view_of
from inferplane.binding.load import DictSource, DummySource, FormatReader, Loaded, Store, TensorSource, load
from inferplane.binding.lock import read_lock, signature, write_lock
from inferplane.binding.plan import MAX_REPACKED_FRACTION, Plan, PlanSettings, bind
from inferplane.binding.plan_text import format_captured_steps, plan_lines
from inferplane.binding.resolver import Resolver
from inferplane.binding.tuning import KernelTiming, Tuned, tune

__all__ = [
    "MAX_REPACKED_FRACTION",
    "Bench",
    "Choice",
    "DictSource",
    "DummySource",
    "FormatReader",
    "KernelTiming",
    "Loaded",
    "Options",
    "Outcome",
    "Plan",
    "PlanSettings",
    "Rejection",
    "Resolver",
    "Store",
    "TensorSource",
    "Tuned",
    "Verdict",
    "View",
    "bind",
    "explain",
    "explain_text",
    "format_captured_steps",
    "link",
    "load",
    "plan_lines",
    "read_lock",
    "reads_index_keys_alone",
    "run_canary",
    "run_case",
    "signature",
    "tune",
    "view_of",
    "write_lock",
]

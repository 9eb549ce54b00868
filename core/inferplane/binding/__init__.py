"""Binding: from a tree of ops and a device's kernels to plain functions over packed weights."""

from inferplane.binding.canary import Verdict, run_canary
from inferplane.binding.check import Bench, Outcome, run_case
from inferplane.binding.choice import Choice, Options, Rejection
from inferplane.binding.explain import explain, explain_text
from inferplane.binding.link import View, link
from inferplane.binding.load import DictSource, DummySource, FormatReader, Loaded, TensorSource, load
from inferplane.binding.lock import read_lock, signature, write_lock
from inferplane.binding.plan import MAX_REPACKED_FRACTION, Plan, Settings, bind
from inferplane.binding.plan_text import captured_text, plan_lines
from inferplane.binding.resolver import Resolver
from inferplane.binding.tuning import Trial, Tuned, tune

__all__ = [
    "MAX_REPACKED_FRACTION",
    "Bench",
    "Choice",
    "DictSource",
    "DummySource",
    "FormatReader",
    "Loaded",
    "Options",
    "Outcome",
    "Plan",
    "Rejection",
    "Resolver",
    "Settings",
    "TensorSource",
    "Trial",
    "Tuned",
    "Verdict",
    "View",
    "bind",
    "explain",
    "explain_text",
    "link",
    "load",
    "plan_lines",
    "read_lock",
    "captured_text",
    "run_canary",
    "run_case",
    "signature",
    "tune",
    "write_lock",
]

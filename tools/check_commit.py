"""Check commit messages: a subject of at most 72 characters in the imperative, and a body where many files change.

    python tools/check_commit.py .git/COMMIT_EDITMSG      # as a commit-msg hook: the message that is being written
    python tools/check_commit.py                          # every commit since the first one that keeps these rules

The imperative is recognized by the subject's first word, which has to be one of `VERBS`. A missing verb is
added there. Whether the why is obvious cannot be computed: a body is required when more than `MAX_FILES_WITHOUT_BODY`
files change.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FIRST_COMMIT = "311e7f1c8ba56a8bf424b82d83b69bbed6c3539a"
"""The first commit that keeps these rules; older ones are not checked."""
MAX_SUBJECT = 72
MAX_FILES_WITHOUT_BODY = 5
VERBS = frozenset(
    """
    Accept Adapt Add Address Adjust Align Allow Annotate Answer Apply Ask Assert Assign Attach Attack Avoid Balance
    Batch Begin Benchmark Bind Block Bound Break Bring Build Bump Cache Calculate Call Cap Capture Carry Catch
    Centralize Change Check Choose Clarify Clean Clear Close Collapse Collect Combine Compare Compile Complete
    Compress Compute Condense Configure Connect Consolidate Convert Copy Correct Count Cover Create Cut Cycle Deal
    Decide Declare Decode Decouple Default Defer Define Delay Delete Deliver Demote Deprecate Derive Describe Detect
    Disable Discard Divide Document Download Drain Draw Drop Dump Eliminate Embed Emit Emulate Enable Encode End
    Enforce Ensure Evict Exclude Expand Expect Explain Export Expose Extend Extract Factor Fall Feed Fetch File Fill
    Filter Find Finish Fit Fix Flatten Fold Follow Forbid Force Format Forward Free Freeze Fuse Gather Generalize
    Generate Get Give Group Guard Handle Harden Hide Hoist Hold Honor Honour Ignore Implement Import Improve Include
    Increase Index Infer Inherit Inline Insert Inspect Install Introduce Isolate Join Judge Keep Label Launch Lay
    Leave Let Lift Limit Link Lint List Load Localize Lock Log Look Lower Make Map Mark Match Measure Memoize Mend
    Merge Mirror Mock Move Name Narrow Normalize Note Observe Offer Omit Open Optimize Order Overlap Override Pack
    Pad Parallelize Parse Partition Pass Permit Pin Pipeline Plan Plant Plug Point Port Prefer Prefetch Prefix
    Prepare Preserve Prevent Print Probe Process Profile Promise Promote Propagate Protect Prove Provide Prune
    Publish Pull Put Quantize Quarantine Quote Raise Read Rebuild Recognize Recompute Record Reduce Refactor Refuse
    Regenerate Register Reject Relax Release Reload Remember Remove Rename Render Reorder Reorganize Repair Repeat
    Rephrase Replace Report Require Reserve Reset Reshape Resolve Respect Restore Restrict Restructure Retire Retry
    Return Reuse Revert Review Revise Reword Rewrite Roll Rotate Round Route Run Sample Save Say Scale Scan Schedule
    Select Send Separate Serve Set Settle Shape Shard Share Ship Shorten Show Shrink Signal Simplify Skip Sort
    Specialize Specify Speed Spell Split Stabilize Stage Standardize Start State Stop Store Stream Strip Structure
    Style Substitute Support Suppress Swap Switch Sync Synchronize Take Teach Tell Test Throttle Tidy Tie Tighten
    Time Trace Track Translate Trim Try Tune Turn Type Unblock Unify Unpack Unwrap Update Upgrade Use Validate
    Vectorize Verify Wait Walk Warm Warn Widen Wire Wrap Write Yield
    """.split()  # noqa: SIM905 - a list of quoted words is hard to read
)
_TRAILER = re.compile(r"^[A-Z][\w-]+: \S")


def check_message(message: str, files: int) -> list[str]:
    """Check one commit message.

    Args:
        message: the text; comment lines are ignored.
        files: number of files that the commit changes.

    Returns:
        What is wrong with it, one sentence each.
    """
    lines = [line.rstrip() for line in message.strip().splitlines() if not line.startswith("#")]
    subject, rest = (lines[0], lines[1:]) if lines else ("", [])
    found = []
    if len(subject) > MAX_SUBJECT:
        found.append(f"the subject has {len(subject)} characters; at most {MAX_SUBJECT}")
    verb = subject.split(" ")[0].rstrip(":,")
    if verb not in VERBS:
        found.append(
            f"the subject begins with {verb!r}, which is no known verb in the imperative; write 'Add ...', "
            "'Fix ...', or add the verb to VERBS of tools/check_commit.py"
        )
    if subject.endswith("."):
        found.append("the subject ends in a full stop")
    if rest and rest[0]:
        found.append("the line after the subject is not empty")
    if files > MAX_FILES_WITHOUT_BODY and not any(line and not _TRAILER.match(line) for line in rest):
        found.append(f"{files} files change, and no body says why")
    return found


def _git(*arguments: str) -> str | None:
    """The output of a git command; None if it fails or git is not installed."""
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None


def check_history(first: str = FIRST_COMMIT) -> list[str] | None:
    """Check every commit after `first` but merges.

    Returns:
        `commit: what is wrong with it`; None if the history cannot be read: no git, no repository, a shallow clone.
    """
    if _git("merge-base", "--is-ancestor", first, "HEAD") is None:
        return None
    listed = _git("log", "--no-merges", "--shortstat", "--format=%x00%h%x01%B%x01", f"{first}..HEAD")
    found = []
    for entry in (listed or "").split("\0")[1:]:
        commit, message, statistics = entry.split("\x01")
        files = re.search(r"(\d+) files? changed", statistics)
        found += [f"{commit}: {what}" for what in check_message(message, int(files[1]) if files else 0)]
    return found


def main(paths: list[str]) -> int:
    """Check the message in a file, or the history; returns the exit code."""
    found: list[str] | None
    if paths:
        staged = (_git("diff", "--cached", "--name-only") or "").splitlines()
        found = check_message(Path(paths[0]).read_text(encoding="utf-8"), len(staged))
    elif (found := check_history()) is None:
        print(f"not run: this history does not contain {FIRST_COMMIT[:7]}")
        return 0
    for what in found:
        print(what, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

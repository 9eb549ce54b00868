"""One step after the other: schedule, run, choose tokens, commit, propose drafts; and the metrics of it."""

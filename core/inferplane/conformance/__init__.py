"""The suite with which authors of a backend test it, in this repository or in their own:

    pytest --pyargs inferplane.conformance --device X

It compares each kernel that plugins declare for X with its op's body, each KV layout with a plain dictionary, and small
models with the same models built from reference bodies. It checks declarations too. A failure states what the kernel
does wrong, in words that need no knowledge of the rest of Inferplane. Options: `--dtype float32,bfloat16`,
`--xfails FILE` (expected failures, strict), `--slow` (two layers at true sizes; always on for accelerators),
`--evidence FILE` (cases and their results, as JSON).

The exit status is 0 if all requested cases ran and passed, 1 if a case failed, 4 on wrong usage, and 5 if the device is
not available: a case that did not run never counts as passed.
"""

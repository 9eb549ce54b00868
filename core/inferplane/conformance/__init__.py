"""The suite that a device's authors run, in this repository or in any other:

    pytest --pyargs inferplane.conformance --device X

It holds every kernel that plugins declare for X against the meaning of its op, every KV layout against a plain
dictionary, whole small models against the same models made of reference bodies, and the declarations against what they
promise. Its one question is what a kernel does wrong; nothing need be known of the rest of Inferplane to read its
answer. Options: `--dtype float32,bfloat16`, `--xfails FILE` (expected failures, strict), `--slow` (two layers at true
sizes; always on for accelerators), `--evidence FILE` (what ran and how it ended, as JSON).

The exit status is 0 when everything that was asked for ran and passed, 1 when something failed, 4 on wrong usage, and
5 when the device is not here: what has not run is never shown as passed.
"""

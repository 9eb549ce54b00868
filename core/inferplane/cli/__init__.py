"""The command line: `inferplane VERB [MODEL] ...`, one module a verb.

A verb's module imports nothing heavy when it is loaded, so that help, versions and mistyped options answer at once; its
`run` imports what it needs. Facts go to standard output, everything said about them to standard error (`screen.py`).
"""

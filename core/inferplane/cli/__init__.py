"""The command line: `inferplane VERB [MODEL] ...`, one module per verb in `verbs`.

A verb's module imports nothing heavy, so that help and errors of usage appear at once; its `run` imports what it
needs. Results go to standard output, remarks about them to standard error (`screen.py`).
"""

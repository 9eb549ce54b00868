"""The verbs of the command line, one module each: `add_arguments(parser)` declares its options, `run` does it."""

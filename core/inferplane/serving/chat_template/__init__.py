"""Chat templates: a checkpoint's own program, run in a process that can be killed."""

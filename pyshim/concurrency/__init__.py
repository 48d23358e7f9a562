"""Concurrency of the shim: owned tasks, undo stacks, deadlines, the copy loops of streams."""

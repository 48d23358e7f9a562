"""Concurrency of the shim: owned tasks, undo stacks, deadlines, threads, the pumps of streams."""

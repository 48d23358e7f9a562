"""How the shim's work runs at the same time: owned tasks, undo stacks, deadlines, threads, the pumps of streams."""

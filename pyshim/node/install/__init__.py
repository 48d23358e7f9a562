"""pyshim on a node: the files that `pyshim install` writes, how they are removed, and a test pod.

Read `plan.py` first: it decides which files there will be (`writes.py`, with the blocks in files that are not ours),
for the handlers of `handlers.py`, with `drop_ins.py` for containerd and CRI-O. `apply.py` writes all of them or none,
and records them (`manifest.py`); `release.py` makes the code and the guest; `containerd_config.py` reads containerd's
configuration; `runtime.py` finds, asks and restarts the container runtime, `running.py` pyshim's own units and
processes; `node_check.py` checks the result with them.
"""

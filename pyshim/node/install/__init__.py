"""pyshim on a node: what `pyshim install` writes, how it is undone, and whether it works.

`plan.py` decides from values which files there will be (`writes.py`; `drop_ins.py` for containerd and CRI-O, `blocks.py`
for files that are not ours); `apply.py` writes them, or nothing; `release.py` makes the code and the guest that they name;
`containerd_config.py` reads containerd's configuration; `runtime.py` asks and restarts containerd. Read
`plan.py` first. Nothing here runs on the way of a pod.
"""

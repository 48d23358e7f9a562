"""What a pod's devices are on this host: the kubelet's answer, annotations and nodes merged, CDI names resolved.

The work is done in a child process that lives for one question (`child.py`): gRPC, YAML and the rest are not in the
daemon. `finder.py` is the daemon's side; `find.py` is the work itself.
"""

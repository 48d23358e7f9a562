"""Finds a pod's devices on this host: the kubelet's answer, annotations and nodes merged, CDI names resolved.

The work is done in a child process that lives for one question (`child.py`), so that the daemon loads neither gRPC nor
YAML. `finder.py` is the daemon's side, `find.py` the work itself, `kubelet.py` the client of PodResources, where
protobuf ends. `vfio.py` looks at VFIO nodes and rebinds functions.
"""

"""The size of a sandbox's VM, its reasons and its fit: pure arithmetic on exact fractions, saved in a record.

No file is read here and nothing is rounded before the last step. `static.py` is the place to start: policies and
limits. `workload.py` says what a pod asks for, `capacity.py` compares the result with the host, `resize.py` decides
changes of a running VM. `model/sizing.py` is the record of a decision; Kubernetes' arithmetic is in `node/kubernetes`.
"""

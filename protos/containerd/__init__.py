"""What containerd and a shim say to each other: services, events, bootstrap messages and options, all over ttrpc.

No CRI (that is `protos.cri`) and no metrics (`protos.cgroups`). Read first: `task_v2.proto`.
"""

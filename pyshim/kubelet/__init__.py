"""The kubelet's PodResources service: which devices, CPUs and memory a pod was given. An edge: protobuf ends here.

gRPC is loaded only by who asks, which in the shim is a child process that lives for one question (`pyshim/devices`).
Start with `pod_resources.py`.
"""

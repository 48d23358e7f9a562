"""The Container Runtime Interface, for test harnesses that drive containerd as the kubelet does.

The shim never imports this package. Read first: `v1.proto`.
"""

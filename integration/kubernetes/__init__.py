"""Pods through a real kubelet and API server: `make peers WHAT=kubelet`.

Other integration tests play the kubelet themselves.
"""

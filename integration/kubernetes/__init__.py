"""Pods through a real kubelet and API server (`make kubelet`). Other integration tests play the kubelet themselves."""

"""The admission webhook. It annotates pods so that their VMs are as large as their requests, and warns before they
start.

`review.py` answers a request, from bytes to JSON: `judge.py` changes a pod, accepts or denies it. Both are pure.
`server.py` and `certificate.py` serve the answers over HTTPS. `configs/helm` and `configs/kubernetes` have the
cluster's objects.
"""

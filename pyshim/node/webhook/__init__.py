"""The admission webhook. It annotates pods so that their VMs are as large as their requests, and warns before they
start.

`review.py` has the whole decision, from bytes to JSON, and is pure. `server.py` and `certificate.py` serve it over
HTTPS. `configs/helm` and `configs/kubernetes` have the cluster's objects.
"""

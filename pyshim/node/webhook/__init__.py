"""The admission webhook: a pod's annotations that make its VM as large as its requests, and warnings before it starts.

`review.py` is the whole decision, bytes to JSON, pure. `server.py` and `certificate.py` serve
it over HTTPS. What a cluster needs to call it is in `configs/helm` and `configs/kubernetes`.
"""

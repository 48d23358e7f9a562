"""The Kubernetes project's suite for CRI, critest, on containerd with pyshim and with runc: `make conformance`.

`critest.py` builds it, `suite_images.py` makes what its images are replaced by, `__main__.py` runs it and prints what
each runtime passes. Nothing of this is a test of `make test`.
"""

"""Suites that others wrote for CRI, on containerd with pyshim and with runc: `make peers WHAT=conformance`.

`critest.py` and `cri_integration.py` build one each and read what it says, `suite_images.py` makes what stands for
their images, `__main__.py` runs them and prints what each runtime passes. Nothing of this is a test of `make test`.
"""

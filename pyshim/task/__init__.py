"""containerd's edge: the Task API decoded, carried to `pyshim/pod`, and answered; events published.

Only the `translate*.py` have protobuf types. Read `service.py` first.
"""

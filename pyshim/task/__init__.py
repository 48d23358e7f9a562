"""containerd's edge: the Task API decoded, carried to `pyshim/pod`, and answered; events published.

Protobuf types live in `translate.py`, `translate_stats.py` and `translate_events.py` only. Read `service.py` first.
"""

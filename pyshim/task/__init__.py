"""The RPC edge: containerd's Task API decoded, carried to the sandbox room, answered; events published.

Protobuf types live in `translate.py` only.
"""

"""Images pulled in the guest: from a registry over plain HTTP, or from an OCI image layout.

The storage driver uses `images.py`. A separate program pulls (`python3 -m guest.agent.pull`), so that the agent keeps
answering, unpacking can change its root directory, and a broken image ends only that process. In it `sources.py` finds
manifest and layers, in a registry or a layout, and `layers.py` unpacks them.
"""

"""Images pulled in the guest: from a registry over plain HTTP, or from an OCI image layout.

`images.py` is what the storage driver uses. A program of its own does the work (`python3 -m guest.agent.pull`), so that
the agent answers meanwhile, unpacking can have a root directory of its own, and a broken image costs no more than that
process. There `source.py` finds manifest and layers, in a registry (`registry.py`) or a layout (`layout.py`), and
`layers.py` unpacks them.
"""

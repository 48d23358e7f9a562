"""Root file systems, volumes and the share: what the guest sees of the host's files and disks.

Read `plan/volumes.py` first, which decides for each mount of a spec. `live.py` makes the share, `attachments.py` gives
a container its volumes: mounts of the host (`binds.py`), disks, and copies where nothing is shared (`copying.py`).
"""

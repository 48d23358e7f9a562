"""A pod's resources, one folder each: network, volumes, devices, cgroups, sizing, templates, confidential.

A folder has `plan` (pure decisions), `host` (acts on the machine), and modules beside them that act while the pod
lives. `linux.py` implements the seam `Host`.
"""

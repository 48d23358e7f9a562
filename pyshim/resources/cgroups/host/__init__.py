"""The host's control groups, v1, v2 and systemd's scopes, as one sandbox uses them.

Read `sandbox_cgroups.py` first. `hierarchies.py` and `removal.py` are import-light: `delete` uses them.
"""

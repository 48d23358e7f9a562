"""Pure: which groups, which limits, which CPU for which vCPU. Read `cgroups.py` first."""

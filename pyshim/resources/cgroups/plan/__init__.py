"""Plans groups, limits and the CPUs of vCPUs. Pure. Read `cgroups.py` first."""

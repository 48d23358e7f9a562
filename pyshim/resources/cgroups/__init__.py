"""The sandbox's control groups on the host. Read `live.py` first."""

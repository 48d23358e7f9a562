"""Pure: which device on which port, and what the guest calls it. Read `devices.py` first."""

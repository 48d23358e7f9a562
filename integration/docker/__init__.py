"""Docker Engine with pyshim and with runc beside it. Read `verbs.py` first, the table of what is compared."""

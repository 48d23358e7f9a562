"""What runs on a node beside shims: the operator's command, the installer, the webhook, the NRI plugin, the monitor.

These rooms import the shim's; no shim imports them. Read `cli/command.py` first: it lists the verbs.
"""

"""The programs beside shims: the operator's command, the installer, the webhook, the NRI plugin, the DRA driver, the
monitor.

These rooms import the shim's rooms; no shim imports them. Read `cli/command.py` first: it lists the verbs.
"""

"""The pod's network: planned, wired on the host, configured in the guest, followed while the pod runs."""

"""The pod's network: planned, wired on the host, told to the guest, followed while the pod runs."""

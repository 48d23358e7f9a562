"""Devices passed through: found, planned on PCI ports, given to containers while the pod runs."""

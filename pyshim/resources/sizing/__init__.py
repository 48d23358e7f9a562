"""Sizes the VM, checks that it fits the host, and resizes it with its containers."""

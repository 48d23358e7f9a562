"""How large the VM is, whether it fits the host, and how it follows its containers while it runs."""

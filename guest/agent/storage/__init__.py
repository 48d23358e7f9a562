"""File systems and devices of the guest: mounts, finds, copies and watches what the shim asks for."""

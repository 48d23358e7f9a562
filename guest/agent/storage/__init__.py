"""File systems and devices of the guest: what the shim asks to be mounted, found, copied or watched."""

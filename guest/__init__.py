"""What runs inside, or makes, the guest: `agent/` (the program in the VM) and `image/` (how the guest image is
built).
"""

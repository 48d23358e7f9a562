"""What runs inside, or makes, the guest: `agent/` (the program in the VM), `forwarder/` (the agent over TLS), `relay/`
(forwarded ports, in C), and `image/` (how the guest image is built).
"""

"""Programs that run inside the guest, or make it: `agent/` (the program in the VM), `forwarder/` (the agent over TLS),
`relay/` (forwarded ports, in C), and `image/` (the build of the guest image).
"""

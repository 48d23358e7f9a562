"""The programs of the guest: `agent/` (the agent in the VM), `forwarder/` (reaches the agent over TLS), `relay/`
(forwarded ports, in C). `image/` builds the guest image.
"""

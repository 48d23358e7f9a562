"""The forwarder: lets a node reach the guest's agent over TCP and TLS, as a peer pod's guest must be reached.

A peer pod runs in a VM that is not on the pod's node, so the agent's vsock or serial port leads nowhere. What is left
is the network. The forwarder listens there, takes only clients with a certificate of the VM's own authority, and copies
bytes between such a connection and the agent's unix socket (`forward.py`). It understands nothing of what it copies.

The agent starts it as a child when the kernel command line says `forwarder.port=N`, and goes on in a network namespace
of its own: containers share the agent's, so they see neither the VM's interface nor the forwarder's port. What the
forwarder needs to know lies on a read-only disk (`material.py`).
"""

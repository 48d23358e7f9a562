"""The forwarder: lets a node reach the guest's agent over TCP and TLS, as a peer pod's guest must be reached.

A peer pod runs in a VM that is not on the pod's node, so the agent's vsock or serial port leads nowhere. What is left
is the network. The forwarder listens there, takes only who has a certificate of the VM's own authority, and copies
bytes between that connection and the agent's unix socket. It understands nothing of what it copies.

It runs when the kernel command line says `forwarder.port=N` and costs nothing otherwise. Process 1 forks it (`fork.py`,
read first) and becomes the agent in a network namespace of its own: containers share the agent's, so they see neither
the VM's interface nor the forwarder's port. What the forwarder needs to know lies on a read-only disk (`material.py`).
`ssl` is imported in the forwarder's process alone.
"""

"""The agent's process, kept once when the image is built: a guest goes on from there and starts no interpreter.

These modules run in the guest that `guest.image.snapshot` boots. `subject` is the agent up to its first step: it has
imported what calls need, and stops. `tracer` started it, and writes memory and registers to the machine's second disk,
in the form of `process`. `guest.image.resume` makes of them the system calls by which /init becomes that process.
"""

"""All contact with Linux: mounts, processes, streams, files, locks, system calls. The only room with syscalls.

Nothing here knows a pod. A call that may block is an async method, which picks a thread or a non-blocking way itself.
"""

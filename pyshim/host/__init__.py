"""All contact with Linux: mounts, processes, streams, files, locks, system calls. The only room with syscalls.

No module here knows a pod. A call that may block is an async method, which picks a thread or a non-blocking way itself.
"""

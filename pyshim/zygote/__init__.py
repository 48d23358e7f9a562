"""The zygote: one process per node that has imported everything a shim needs and is forked for each new one.

It has no thread and no event loop, holds nothing of any pod, and its forks serve only callers that live in its own
world (user, namespaces, rights). A fork becomes what an exec by the caller would have made: session, control groups,
limits, environment, descriptors, command line. Whatever speaks against it is answered "no", and the caller executes.

One fork is always made ahead: it waits at the socket, takes the next caller, and the zygote makes another. So nobody
waits for the copy of the page tables, nor for the first writes to shared memory that come after it, nor, as the fork
waits in the control groups of the caller before, for the kernel to move a process (`host/cgroups/first_move.py`).

An upgrade replaces it: it listens at an address made of version and place, and it ends as soon as a request finds its
own files changed. Forked daemons go on, they are nobody's children but the reaper's.

`server.py` first; `fork.py` is what happens in a fork, `code.py` knows the files on disk.
"""

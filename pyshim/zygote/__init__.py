"""The zygote: one process per node that has imported everything a shim needs and is forked for each new one.

It has no thread and no event loop, holds nothing of any pod, and serves only callers of its own world (user,
namespaces, rights). A fork becomes what an exec by the caller would have made: session, control groups, limits,
environment, descriptors, command line. Where that cannot be, it answers "no" with the reason, and the caller executes.

An upgrade replaces it: it listens at an address made of version and place, and it ends as soon as a request finds its
own files changed. Forked daemons go on without it.

Read `server.py` first; `fork.py` reads a caller's request and runs in the child, `code.py` watches the
files on disk.
"""

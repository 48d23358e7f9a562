"""This process's own memory: what the kernel is told of it, and how the zygote's forks share theirs."""

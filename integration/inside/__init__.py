"""Programs that tests run inside a guest, where the kernel has cgroup v2: standard library and the product alone."""

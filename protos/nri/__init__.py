"""NRI, the Node Resource Interface of containerd and CRI-O: what a plugin that places CPUs and memory needs of it."""

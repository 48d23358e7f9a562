"""Root file systems, volumes and the share: what the guest sees of the host's files and disks."""

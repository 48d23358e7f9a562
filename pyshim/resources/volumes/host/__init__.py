"""virtiofsd, and what a volume's source is on this machine."""

"""What the integration tests stand on. Nothing here knows a test; read enclosure.py, then containerd.py."""

"""The ground of the integration tests. Nothing here is about one test; read enclosure.py, then containerd.py."""

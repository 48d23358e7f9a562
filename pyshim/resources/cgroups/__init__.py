"""The sandbox's control groups on the host."""

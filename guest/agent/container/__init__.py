"""Containers and their processes: the spec crun gets, crun itself, stdio, statistics."""

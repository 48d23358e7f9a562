"""`pyshim monitor`: the node's endpoint for Prometheus, in Kata's terms kata-monitor.

`server.py` is its HTTP, `scrape.py` asks the shims, `sandboxes.py` finds them, `names.py` how Kubernetes
calls them. No shim imports this room.
"""

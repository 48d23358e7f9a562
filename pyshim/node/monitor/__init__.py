"""`pyshim monitor`: the node's endpoint for Prometheus, in Kata's terms kata-monitor.

`server.py` answers HTTP, `scrape.py` asks the shims (`shim_client.py`), `sandboxes.py` finds them, `names.py` asks for
their Kubernetes names. No shim imports this room.
"""

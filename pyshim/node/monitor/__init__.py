"""`pyshim monitor`: the node's endpoint for Prometheus, in Kata's terms kata-monitor.

`server.py` answers HTTP, `scrape.py` asks the shims, `shims.py` finds them and sends the requests. No shim imports this
room.
"""

"""What operators ask of one shim: its monitor socket, and the metrics that it answers with.

`socket.py` is the HTTP server, `answers.py` the paths, `shim_metrics.py` what is measured, `exposition.py` Prometheus'
text format, `guest_text.py` the judge of what a guest says in it. A shim imports its own code at start only, so all of
this is small: no HTTP library and no metrics library (prometheus_client takes 4.3 MB in each shim, h11 0.5 MB and
17 ms). The node's endpoint, which asks all shims, is `pyshim/node/monitor`.
"""

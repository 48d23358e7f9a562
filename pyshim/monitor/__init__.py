"""One shim's monitor socket for operators and CSI drivers, and the metrics that it serves.

`socket.py` is the HTTP server, `answers.py` the paths, `shim_metrics.py` the metrics, `exposition.py` Prometheus' text
format, with the check of a guest's metrics. A shim imports its own code at start only, so
all of this is small: no HTTP library and no metrics library (prometheus_client takes 4.3 MB in each shim, h11 0.5 MB
and 17 ms). The node's endpoint, which asks all shims, is `pyshim/node/monitor`.
"""

"""The cost of the shim, as ratios to references measured in the same run: `make bench`.

`measures.py` takes single samples, `rounds.py` says in which order, `report.py` turns them into a table, JSON, Markdown
and `chart.py` into an SVG. `peers.py` measures ours beside other shims on `remote_stub.py`. No number here is a limit:
nothing fails because it was slow.
"""

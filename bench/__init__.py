"""What the shim costs, as ratios to references measured in the same run: `make bench`.

`measures.py` takes single samples, `rounds.py` says in which order, `report.py` turns them into a table, JSON, Markdown
and `chart.py` into an SVG. No number here is a limit: nothing fails because it was slow.
"""

"""The ratios as an SVG: one dot per round, a bar at the median, on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

from bench.report import Row


def write_svg(path: Path, found: list[Row], caption: str) -> None:
    """Equal rows and captions give equal files."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "pyshim"
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.5 * len(found) + 1.6), layout="constrained")
    for height, row in enumerate(reversed(found)):
        axes.barh(height, row.ratio, height=0.5, color="#9db8d6")
        axes.plot(row.ratios, [height] * len(row.ratios), "o", color="#1f3b5c", markersize=3.5, alpha=0.7)
        axes.text(max(row.ratios) * 1.12, height, f"{row.ratio:.2f}", va="center", fontsize=8)
    labels = [f"{row.title.replace('`', '')}\nover {row.reference_title}" for row in reversed(found)]
    axes.set_yticks(range(len(found)), labels, fontsize=8)
    axes.set_xscale("log")
    axes.axvline(1, color="#888888", linewidth=0.8)
    least = min(min(row.ratios) for row in found)
    most = max(max(row.ratios) for row in found)
    axes.set_xlim(least / 2, most * 2.5)
    axes.set_xlabel("ratio to the reference of the same round (bar: median, dots: rounds)", fontsize=8)
    axes.set_title(caption, fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)

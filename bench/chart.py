"""Figures as an SVG: ratios (a dot per round, a bar at the median, on a logarithmic axis), and sizes over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from bench.report import Row


def _pyplot() -> Any:
    """It draws equal files for equal figures."""
    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "pyshim"
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    return pyplot


def write_sizes(path: Path, lines: Mapping[str, Sequence[tuple[float, float]]], caption: str) -> None:
    """A line for each name, of minutes and MiB."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=name)
    axes.set_ylim(0)
    axes.set_xlabel("minutes", fontsize=8)
    axes.set_ylabel("private memory, MiB", fontsize=8)
    axes.set_title(caption, fontsize=9)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def write_svg(path: Path, found: list[Row], caption: str) -> None:
    """Equal rows and captions give equal files."""
    pyplot = _pyplot()
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

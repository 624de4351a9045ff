"""Shared with the experiments: the root directory, tables, the commit."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def markdown(cells, corner=""):
    """A DataFrame of text as a table in Markdown. Its index is the first column, headed corner."""
    rows = [[f"`{name}`", *row] for name, row in zip(cells.index, cells.to_numpy())]
    rows = [[corner, *cells], ["---"] * (1 + cells.shape[1]), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def commit():
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"

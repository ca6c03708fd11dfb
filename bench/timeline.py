"""A run as a picture: python bench/timeline.py runs/NAME [--out timeline.png] [--begin 0] [--seconds 60]

From the gateway's log: a line for each rollout that ran (a place is used again when its rollout is over). Grey: the harness and
its tools; coloured: a model call, in the colours of the weight versions of its tokens, as long as its share of the tokens; bands:
the trainer's turn, update (with sleep and load) and push (with wake). A call that lasts through a band was held.
"""

import argparse
import itertools
import sqlite3
import sys
from pathlib import Path
from typing import Any

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gateway import loaded  # noqa: E402

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

COLOURS = pyplot.get_cmap("tab10").colors


def load(log: Path) -> tuple[list[Any], list[dict]]:
    """Rollouts (id, kind, start, end, [(start, end, versions)] of the calls), in their order; the records of the steps."""
    if not log.exists():
        sys.exit(f"error: there is no {log}; give the directory of a run")
    db = sqlite3.connect(f"file:{log}?mode=ro", uri=True)
    steps = [loaded(data) for (data,) in db.execute("SELECT data FROM steps ORDER BY step")]
    rollouts = db.execute("SELECT id, kind, started_at, finished_at FROM rollouts WHERE started_at NOT NULL ORDER BY started_at")
    sql = "SELECT started_at, finished_at, versions FROM turns WHERE rollout = ? AND finished_at NOT NULL ORDER BY started_at"
    found = [(*rollout, [(start, end, loaded(versions) or []) for start, end, versions
                         in db.execute(sql, rollout[:1])]) for rollout in rollouts.fetchall()]
    if not found or not steps:
        sys.exit(f"error: {log} has no rollout or no step yet")
    return found, steps


def draw(rollouts: list[Any], steps: list[dict], begin: float, seconds: float, out: Path) -> None:
    zero = rollouts[0][2]
    last = max(step["time"] for step in steps) if not seconds else zero + begin + seconds
    places: list[float] = []  # when each is free again
    bars: dict[Any, list[tuple[int, float, float]]] = {}  # colour -> (place, start, seconds)
    for _, kind, start, end, calls in rollouts:
        end = end or last
        if end < zero + begin or start > last:
            continue
        place = next((i for i, free in enumerate(places) if free <= start), len(places))
        places[place:place + 1] = [end]
        bars.setdefault("0.85" if kind == "train" else "0.93", []).append((place, start - zero, end - start))
        for at, until, versions in calls:
            for version, tokens in itertools.groupby(versions):
                share = (until - at) * len(list(tokens)) / len(versions)
                bars.setdefault(COLOURS[version % 10], []).append((place, at - zero, share))
                at += share
    figure, axes = pyplot.subplots(figsize=(12, min(8, 1.5 + 0.09 * len(places))), dpi=110)
    for colour, parts in bars.items():
        where, left, width = zip(*parts)
        axes.barh(where, width, left=left, height=0.85, color=colour, linewidth=0)
    for step in steps:
        pushing = step["time"] - step["seconds_push"] - zero
        axes.axvspan(pushing - step["seconds_update"], pushing, color="black", alpha=0.35, linewidth=0)
        axes.axvspan(pushing, pushing + step["seconds_push"], color="crimson", alpha=0.35, linewidth=0)
        if begin < pushing < last - zero:
            axes.annotate(str(step["step"]), (pushing, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize=7)
    axes.set(xlim=(begin, last - zero), ylim=(len(places), -1), xlabel="seconds", ylabel="rollouts that run")
    legend = [Patch(color="0.85", label="harness and tools"), Patch(color="0.93", label="of an evaluation"),
              Patch(color=COLOURS[0], label="call (colour: weight version)"),
              Patch(color="black", alpha=0.35, label="sleep, load, update"), Patch(color="crimson", alpha=0.35, label="push, wake")]
    figure.legend(handles=legend, loc="lower center", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("timeline.png"))
    parser.add_argument("--begin", type=float, default=0.0, help="seconds after the first rollout's start")
    parser.add_argument("--seconds", type=float, default=0.0, help="shown; 0: to the last step")
    options = parser.parse_args()
    rollouts, steps = load(options.run / "gateway.sqlite")
    draw(rollouts, steps, options.begin, options.seconds, options.out)
    print(f"{len(rollouts)} rollouts, {len(steps)} steps: {options.out}")


if __name__ == "__main__":
    main()

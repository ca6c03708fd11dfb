"""Synchronous against collocated async, live: python bench/async_live.py [--seeds 0 1 2 3 4] [--policies ...] [flags of train_search.py]

`train_search.py` on this machine, with tools that sleep by a long-tailed law, so that a rollout is mostly tools, as on real
tasks. All runs start from one small model and make the same number of updates of the same size; each ends with an
evaluation (tools that do not sleep), which is not timed. The policies, with the groups in flight in steps' worth:

    sync        the next step's groups start when the update is over
    drain N     an update as soon as a step's groups are complete and the calls in flight have ended; others are held
    ours N      calls are aborted and go on after the update; the scheduler says when, and how many updates
    ours auto   the same, and as many groups as the measured tail asks for

`seconds`: from the first rollout's start to the end of the last update, everything between included; speed-up against the first policy. The last lines are means over the seeds.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import agents  # noqa: E402
import train_search  # noqa: E402

MEDIAN, SIGMA, MOST = 0.25, 1.6, 15.0  # of the seconds that a tool sleeps: log-normal, cut at MOST
GROUPS, ROLLOUTS, STEPS = 8, 4, 10
POLICIES = ("sync", "drain 2", "ours 2", "drain 4", "ours 4", "ours auto")
SETTINGS = ["--groups-per-step", GROUPS, "--rollouts-per-group", ROLLOUTS, "--max-running", 16 * GROUPS * ROLLOUTS,
            "--checkpoint-every", 0, "--lr", 5e-4, "--eval-every", 1000]


def sleepy_search_agent(task: dict, workdir: Path) -> None:
    """The harness: agents.search_agent with a slow tool."""
    search = agents.run_search

    def slow(url: str, query: str, k: int) -> list[dict[str, str]]:
        time.sleep(min(MOST, MEDIAN * math.exp(SIGMA * random.gauss(0, 1))))
        return search(url, query, k)

    agents.run_search = slow  # of this rollout's process
    agents.search_agent(task, workdir)


def train(policy: str) -> None:
    """One run, in this process: the recipe with a policy, a slow harness for training, an evaluation at the end alone."""
    from scheduler import Scheduler
    from trainer import Run

    make_task, evaluate, switch = train_search.task, Run.start_evaluation, Run.switch_to_trainer

    def task(config: Any, name: str, *rest: Any) -> dict:
        made = make_task(config, name, *rest)
        made["agent"]["harness"] = "async_live:sleepy_search_agent" if name.startswith("train.") else made["agent"]["harness"]
        return made

    def drain(run: Run) -> dict[str, float]:
        idle = lambda: run.gateway.call("GET", "/state")["in_flight"] == 0  # noqa: E731
        run.children.wait_until(idle, "the calls in flight", 60, but="engine")
        return switch(run)

    train_search.task = task
    Run.start_evaluation = lambda run, step: evaluate(run, step) if step >= run.config.steps else None
    if policy.startswith("drain"):
        Run.switch_to_trainer, Run.engine_due, Scheduler._one_more = drain, lambda *_: True, lambda *_: False
    train_search.main()


def measure(policy: str, seed: int, steps: int, model: str, flags: list[str]) -> dict[str, float]:
    name = f"async-{policy.replace(' ', '-')}-{seed}-{int(time.time())}"
    times = policy.partition(" ")[2] or "1"
    in_flight = times if times == "auto" else int(times) * GROUPS
    command = [sys.executable, __file__, "--train", policy, "--name", name, "--seed", seed, "--steps", steps, "--model", model,
               "--groups-in-flight", in_flight, *SETTINGS, *flags]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'bench'}", "WANDB_MODE": "disabled"}
    done = subprocess.run([str(word) for word in command], cwd=ROOT, env=environment, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{policy}, seed {seed}: status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    records = [json.loads(line) for line in (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    updates = [record for record in records if record["step"]]
    mean = lambda key: statistics.mean(record.get(key, 0.0) for record in updates)  # noqa: E731
    return {"seconds": updates[-1]["seconds_total"], "eval": updates[-1]["eval_reward"], "in flight": mean("groups_in_flight"),
            "update s": mean("seconds_update"), "switch s": mean("seconds_switch"), "stale": mean("staleness_mean"),
            "stale max": max(record["staleness_max"] for record in updates), "ess": mean("ess"),
            "dropped": updates[-1].get("total_groups_stale", 0), "tokens": mean("trained_tokens")}


def row(policy: str, seed: Any, r: dict[str, float], base: float) -> str:
    numbers = " ".join(f"{r[key]:{max(8, len(key))}.2f}" for key in r)
    return f"{policy:10} {seed!s:>5} {numbers} {base / r['seconds']:8.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--policies", nargs="+", default=POLICIES, help=f"of {POLICIES}, or other numbers")
    parser.add_argument("--steps", type=int, default=STEPS)
    options, flags = parser.parse_known_args()  # others are train_search.py's
    model = train_search.built_in_model(train_search.load_data(train_search.SearchConfig())[3], 0)
    print(f"tools sleep min({MOST:g}, {MEDIAN} exp({SIGMA} z)) seconds, z normal; {options.steps} updates of {GROUPS} groups of "
          f"{ROLLOUTS}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    results: dict[str, list[dict[str, float]]] = {}
    for seed in options.seeds:
        for policy in options.policies:
            r = measure(policy, seed, options.steps, model, flags)
            if not results:
                print(f"{'policy':10} {'seed':>5} " + " ".join(f"{key:>8}" for key in r) + f" {'speed-up':>9}")
            results.setdefault(policy, []).append(r)
            print(row(policy, seed, r, results[options.policies[0]][-1]["seconds"]), flush=True)
    base = results[options.policies[0]]
    for policy, runs in results.items():
        means = [{key: statistics.mean(r[key] for r in found) for key in found[0]} for found in (base, runs)]
        print(row(policy, "mean", means[1], means[0]["seconds"]), end="")
        if len(runs) > 1:  # standard errors over the seeds
            errors = [statistics.stdev(r["eval"] for r in found) / len(found) ** 0.5 for found in (base, runs)]
            gap, error = means[1]["eval"] - means[0]["eval"], math.hypot(*errors)
            print(f"   eval against {options.policies[0]}: {gap:+.3f}, standard error {error:.3f}", end="")
        print()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        policy = sys.argv[2]
        del sys.argv[1:3]
        train(policy)
    else:
        main()

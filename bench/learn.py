"""Does it learn? `python train_search.py` with its defaults for three seeds, each with a small model of its own.

    python bench/learn.py [seed ...] [flags of train_search.py, e.g. --engine vllm --ranks 2]

Prints held-out exact match at the training temperature over the steps, and the minutes from the start of the command (the
making of the small model included) until it reached 0.8. Fails if a seed did not reach 0.75 within 12 minutes.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(seed: int, flags: list[str]) -> bool:
    name = f"learn-{seed}-{int(time.time())}"
    start = time.monotonic()
    subprocess.run([sys.executable, "train_search.py", "--seed", str(seed), "--name", name, *flags], cwd=ROOT, check=True)
    total = time.monotonic() - start
    records = [json.loads(line) for line in (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    before = total - records[-1]["seconds_total"]  # making the model, starting the services
    curve = [(r["step"], r["eval_reward"], (before + r.get("seconds_total", 0)) / 60) for r in records if "eval_reward" in r]
    print(f"seed {seed}: " + ", ".join(f"step {step}: {reward:.3f} ({minutes:.1f} min)" for step, reward, minutes in curve))
    for bar in (0.75, 0.8):
        reached = [minutes for _, reward, minutes in curve if reward >= bar]
        print(f"  {bar} after {min(reached):.1f} min" if reached else f"  {bar} was not reached")
    return any(reward >= 0.75 and minutes <= 12 for _, reward, minutes in curve)


if __name__ == "__main__":
    first = next((i for i, word in enumerate(sys.argv) if word.startswith("--")), len(sys.argv))
    seeds = [int(seed) for seed in sys.argv[1:first]] or [0, 1, 2]
    sys.exit(0 if all([run(seed, sys.argv[first:]) for seed in seeds]) else 1)

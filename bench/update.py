"""One update of ours against TRL's GRPO loss on the same rows and the same model: trained tokens a second, peak memory.

    python bench/update.py [--large]        the 0.7M-parameter model; --large: one of 135M parameters, too

Both sides get ragged multi-turn rows and make one AdamW step of them. Ours is `Policy.update`; TRL's is the loss of its
GRPOTrainer as that calls it (padded micro-batches of its default size, in the order of the data), backward, clipping and
step. Each runs in a process of its own; memory is what the process has at most beyond weights, gradients' buffers aside,
and optimizer. Needs `trl` (requirements-dev.txt).
"""

import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.vllm_cpu import make_tiny_model  # noqa: E402
from trajectory import Sample  # noqa: E402

LARGE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152}  # the shape of SmolLM2-135M
TRL_ROWS = 8  # TRL's default rows of a micro-batch
TOKENS = 4096  # of ours: as much padded as most of TRL's


def rollouts(count: int, longest: int) -> tuple[list[Sample], list[float]]:
    """Rows of several turns, long-tailed: most are short. About half of the tokens are trained."""
    draw, rows, advantages = random.Random(0), [], []
    for number in range(count):
        advantage = draw.uniform(-1, 1)
        for _ in range(draw.choice((1, 1, 2, 3))):
            length, mask = min(longest, int(longest / 8 * draw.paretovariate(1.2))), []
            mask += [False] * (length // 4)
            while len(mask) < length:
                mask += [True] * draw.randint(8, 60) + [False] * draw.randint(4, 60)
            mask = mask[:length]
            rows.append(Sample([draw.randrange(3, 1000) for _ in mask], mask, [-7.0 if m else 0.0 for m in mask],
                               [0 if m else -1 for m in mask], rollout=f"r{number}"))
            advantages.append(advantage)
    return rows, advantages


def ours(model: str, rows: list[Sample], advantages: list[float]) -> Any:
    from config import Config
    from trainer import Policy

    policy = Policy(Config(name="bench", model=model, threads=os.cpu_count() or 1, device="cpu", micro_batch_tokens=TOKENS), model)
    return lambda: policy.update(rows, advantages, 0)


def trl(model: str, rows: list[Sample], advantages: list[float]) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    batches = []
    for start in range(0, len(rows), TRL_ROWS):
        part = rows[start:start + TRL_ROWS]
        splits = [row.mask.index(True) for row in part]  # TRL: a prompt, then a completion with its own mask
        prompt, rest = max(splits), max(len(row.ids) - split for row, split in zip(part, splits))
        batch = {name: torch.zeros(len(part), width, dtype=torch.long) for name, width in
                 [("prompt_ids", prompt), ("prompt_mask", prompt), ("completion_ids", rest), ("completion_mask", rest),
                  ("tool_mask", rest)]}
        for i, (row, split) in enumerate(zip(part, splits)):
            batch["prompt_ids"][i, prompt - split:] = torch.tensor(row.ids[:split])
            batch["prompt_mask"][i, prompt - split:] = 1
            batch["completion_ids"][i, :len(row.ids) - split] = torch.tensor(row.ids[split:])
            batch["completion_mask"][i, :len(row.ids) - split] = 1
            batch["tool_mask"][i, :len(row.ids) - split] = torch.tensor(row.mask[split:]).long()
        batch["advantages"] = torch.tensor(advantages[start:start + TRL_ROWS])
        batch["num_items_in_batch"] = torch.tensor(sum(row.trained_tokens for row in rows))
        batches.append(batch)
    arguments = GRPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, report_to="none", gradient_checkpointing=False, bf16=False,
                           per_device_train_batch_size=TRL_ROWS, num_generations=TRL_ROWS, disable_tqdm=True,
                           gradient_accumulation_steps=len(batches))
    trainer = GRPOTrainer(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), lambda completions, **_: [0.0] * len(completions),
                          arguments, Dataset.from_list([{"prompt": "x"}] * TRL_ROWS))
    trainer.current_gradient_accumulation_steps = len(batches)
    network = trainer.model.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6, fused=True)

    def update() -> None:
        for batch in batches:
            trainer.compute_loss(network, batch).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update


def memory(field: str) -> float:
    """MB of this process: VmRSS now, VmHWM at most since it was reset."""
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) / 1e3


def measure(side: str, model: str, count: int, longest: int, warm: bool) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    rows, advantages = rollouts(count, longest)
    update = {"ours": ours, "trl": trl}[side](model, rows, advantages)
    if warm:
        update()
    weights = sum(file.stat().st_size for file in Path(model).glob("*.safetensors")) / 1e6
    gc.collect()
    state = 0 if warm or side == "ours" else 2 * weights  # TRL's AdamW makes its two moments in the measured step
    before = memory("VmRSS") + state
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    start = time.perf_counter()
    update()
    seconds, tokens = time.perf_counter() - start, sum(row.trained_tokens for row in rows)
    print(json.dumps({"tokens": tokens, "tokens_per_second": tokens / seconds, "extra_mb": memory("VmHWM") - before}))


def main() -> None:
    sizes: list[tuple[str, dict, int, int, bool]] = [("0.7M", {}, 48, 1024, True)]
    if "--large" in sys.argv:
        sizes.append(("135M", LARGE, 6, 512, False))
    for name, shape, count, longest, warm in sizes:
        with tempfile.TemporaryDirectory() as directory:
            model = make_tiny_model(Path(directory) / "model", **shape)
            results = {}
            for side in ("trl", "ours"):
                argv = [sys.executable, __file__, "--measure", side, str(model), str(count), str(longest), str(int(warm))]
                done = subprocess.run(argv, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr[-2000:])
                results[side] = json.loads(done.stdout.splitlines()[-1])
            fast = results["ours"]["tokens_per_second"] / results["trl"]["tokens_per_second"]
            small = results["ours"]["extra_mb"] / results["trl"]["extra_mb"]
            for side, result in results.items():
                print(f"{name:>5} {side:>5}: {result['tokens']} trained tokens, {result['tokens_per_second']:8.0f} a second, "
                      f"{result['extra_mb']:7.0f} MB beyond weights and optimizer")
            print(f"{name:>5} ours / trl: {fast:.2f} x the speed (bar: 1.5), {small:.2f} x the memory (bar: 0.5)", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6] == "1")
    else:
        main()

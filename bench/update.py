"""One update of ours against one of TRL's GRPOTrainer: the same rows and model, in turns, on the CPUs of this machine.

    python bench/update.py [0.7M] [even] [135M] [--trl-rows 8]     parameters of the model; 135M needs 12 GB

It prints the cosine of the two gradients of the same loss (our `token_mean` is TRL's default, `dapo`; no clipping, no
off-policy correction), trained tokens a second, and peak memory beyond weights and optimizer: resident memory at most
during an update less that before it, the gradients included. Medians of updates made in turns, with activations kept
and with activation checkpointing (TRL's default) on both sides. Exit status 1 if a bar is missed.

Rows are multi-turn rollouts: a prompt, then replies, which are trained, and tool results, which are not; the number of
turns is long-tailed. `even`: the 0.7M model again, 4 turns in every row: the other extreme, without a bar. Both sides:
float32, all cores, fused AdamW. Ours is `Policy.update` as configured by default. TRL's is GRPOTrainer's `training_step` on
batches made as it makes them: 8 rows each, in random order, padded to the longest prompt and the longest completion of the
whole step. (On a GPU it would skip padding in the output layer, out of which ours has what is not trained, too. With vLLM it
would add a forward to score the rows.)
"""

import argparse
import ctypes
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.vllm_cpu import make_tiny_model  # noqa: E402
from trajectory import Sample  # noqa: E402

LARGE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152}  # the shape of SmolLM2-135M
# model: its shape, rows, the length of what is said in them, whether all have as many turns, updates measured
CASES = {"0.7M": ({}, 24, 1.0, False, 3), "even": ({}, 24, 1.0, True, 3), "135M": (LARGE, 8, 0.3, False, 1)}
SPEED, MEMORY, COSINE = 1.5, 0.5, 0.999
Rows = tuple[list[Sample], list[float]]  # and the advantage of each
# (network, gradients: with or without checkpointing, optimizer step)
Side = tuple[torch.nn.Module, Callable[[], None], Callable[[], None]]


def make_rows(count: int, scale: float, even: bool) -> Rows:
    """`count` rollouts, 8 of each prompt, with 1 to 12 turns, 4 on average."""
    draw, words, rows = random.Random(0), random.Random(1), []

    def length(low: int, high: int) -> int:
        return int(scale * draw.randint(low, high))

    for number in range(count):
        if number % 8 == 0:
            prompt = [words.randrange(3, 1000) for _ in range(length(40, 160))]
        mask, turns = [False] * len(prompt), 4 if even else 1 + min(11, int(draw.expovariate(1 / 3)))
        for turn in range(turns):
            mask += [False] * (length(10, 120) if turn else 0) + [True] * length(10, 80)
        ids = prompt + [words.randrange(3, 1000) for _ in mask[len(prompt):]]
        rows.append(Sample(ids, mask, [0.0] * len(ids), [0 if m else -1 for m in mask], rollout=f"r{number}"))
    return rows, [draw.uniform(-1, 1) for _ in rows]


def ours(model: str, data: Rows, _: int) -> Side:
    from config import Config
    from trainer import Policy

    policy = Policy(Config(name="bench", model=model, device="cpu", threads=torch.get_num_threads(),
                           loss_normalization="token_mean", importance="none"), model)
    step, policy._step = policy._step, lambda: 0.0  # type: ignore[method-assign]
    return policy.model, lambda: policy.update(*data, 0), step


def trl(model: str, data: Rows, batch_rows: int) -> Side:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer.utils import pad, shuffle_sequence_dict, split_tensor_dict

    rows, advantages = data
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to="none", disable_tqdm=True,
        per_device_train_batch_size=batch_rows, gradient_accumulation_steps=len(rows) // batch_rows)
    trainer = GRPOTrainer(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), lambda completions, **_: [0.0] * len(completions),
                          arguments, Dataset.from_list([{"prompt": "x"}] * 8))
    trainer.current_gradient_accumulation_steps = arguments.gradient_accumulation_steps
    trainer._prepare_inputs = lambda batch: batch  # they are not sampled here
    network, optimizer = trainer.model, trainer.create_optimizer()
    starts = [row.mask.index(True) for row in rows]  # of the completion, whose tool results have a mask
    batch = {"advantages": torch.tensor(advantages), "num_items_in_batch": torch.tensor(sum(row.trained_tokens for row in rows))}
    for name, side, columns in [
        ("prompt_ids", "left", [row.ids[:start] for row, start in zip(rows, starts)]),
        ("prompt_mask", "left", [[1] * start for start in starts]),
        ("completion_ids", "right", [row.ids[start:] for row, start in zip(rows, starts)]),
        ("completion_mask", "right", [[1] * len(row.ids[start:]) for row, start in zip(rows, starts)]),
        ("tool_mask", "right", [[int(m) for m in row.mask[start:]] for row, start in zip(rows, starts)]),
    ]:
        batch[name] = pad([torch.tensor(column) for column in columns], 0, side)
    batches = split_tensor_dict(shuffle_sequence_dict(batch), arguments.gradient_accumulation_steps)

    def gradients() -> None:
        for part in batches:
            trainer.training_step(network, part, None)

    def step() -> None:
        trainer.accelerator.clip_grad_norm_(network.parameters(), arguments.max_grad_norm)
        optimizer.step()
        network.zero_grad()

    return network, gradients, step


def memory(field: str) -> float:
    """MB of this process: VmRSS now, VmHWM at most since it was reset."""
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) / 1e3


def serve(side: str, model: str, case: str, batch_rows: int, file: str) -> None:
    """A process with one of the sides: writes the gradient to `file`, then makes an update for each line of its input."""
    _, count, scale, even, _ = CASES[case]
    data = make_rows(count, scale, even)
    network, gradients, step = {"ours": ours, "trl": trl}[side](model, data, batch_rows)
    gradients()  # warms up, too, and the step makes the optimizer's state
    torch.save({name: p.grad for name, p in network.named_parameters()}, file)
    step()
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "checkpointed\n":
            network.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            network.gradient_checkpointing_disable()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier update has left does not count as there before this one
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
        start = time.perf_counter()
        gradients()
        step()
        seconds = time.perf_counter() - start
        print(json.dumps({"speed": sum(row.trained_tokens for row in data[0]) / seconds, "memory": memory("VmHWM") - before}), flush=True)


def same_direction(one: Path, other: Path) -> tuple[float, float]:
    """Cosine of two gradients, and the norm of the second as a part of the first's."""
    a, b = torch.load(one), torch.load(other)
    assert a.keys() == b.keys()
    sums = sum(torch.stack([(x * y).sum(), (x * x).sum(), (y * y).sum()]) for x, y in ((a[name].double(), b[name].double()) for name in a))
    return (sums[0] / (sums[1] * sums[2]).sqrt()).item(), (sums[2] / sums[1]).sqrt().item()


def measure(case: str, batch_rows: int) -> bool:
    """Prints how the sides compare; whether every bar is met."""
    shape, count, scale, even, repeats = CASES[case]
    rows, _ = make_rows(count, scale, even)
    prompts = [row.mask.index(True) for row in rows]
    padded = count * (max(prompts) + max(len(row.ids) - prompt for row, prompt in zip(rows, prompts)))
    lengths = sorted(len(row.ids) for row in rows)
    print(f"{case}: {count} rows of {lengths[0]} to {lengths[-1]} tokens (median {lengths[count // 2]}); {sum(lengths)} tokens, "
          f"{sum(row.trained_tokens for row in rows)} of them trained; padded as TRL does {padded}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        directory, sides = Path(place), {}
        model = make_tiny_model(directory / "model", **shape)
        for side in ("trl", "ours"):
            argv = [sys.executable, __file__, "--side", side, str(model), case, str(batch_rows), str(directory / side)]
            with open(directory / f"{side}.log", "w") as log:
                sides[side] = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1)

            def answer(side: str) -> str:
                line = sides[side].stdout.readline()
                return line or sys.exit(f"{side} ended:\n{(directory / f'{side}.log').read_text()[-3000:]}")

            assert answer(side) == "ready\n"  # one at a time
        cosine, ratio = same_direction(directory / "trl", directory / "ours")
        print(f"{case}: cosine of the gradients {cosine:.9f}, norms {ratio:.6f} (bar: {COSINE})", flush=True)
        good = cosine > COSINE and abs(ratio - 1) < 0.01
        results: dict[tuple[str, str], list[dict]] = {}
        for how in ("kept", "checkpointed") * repeats:
            for side, process in sides.items():
                process.stdin.write(how + "\n")
                results.setdefault((how, side), []).append(json.loads(answer(side)))
                print(f"  {side}, activations {how}: {results[how, side][-1]}", file=sys.stderr, flush=True)
        for process in sides.values():
            process.stdin.close()
            process.wait()
    for how in ("kept", "checkpointed"):
        both = {}
        for side in sides:
            both[side] = {name: statistics.median(one[name] for one in results[how, side]) for name in ("speed", "memory")}
            speeds = [one["speed"] for one in results[how, side]]
            print(f"{case}: activations {how}, {side:>4}: {both[side]['speed']:6.0f} trained tokens a second "
                  f"({min(speeds):.0f} to {max(speeds):.0f}), {both[side]['memory']:6.0f} MB")
        fast, small = (both["ours"][name] / both["trl"][name] for name in ("speed", "memory"))
        print(f"{case}: activations {how}, ours / trl: {fast:.2f} x the speed (bar: {SPEED}), {small:.2f} x the memory (bar: {MEMORY})",
              flush=True)
        good &= even or fast >= SPEED and small <= MEMORY
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help="some of: " + ", ".join(CASES))
    parser.add_argument("--trl-rows", type=int, default=8, help="rows of TRL's micro-batch; 8 is its default")
    args = parser.parse_args()
    sys.exit(0 if all([measure(case, args.trl_rows) for case in args.cases]) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        serve(*sys.argv[2:5], int(sys.argv[5]), sys.argv[6])
    else:
        main()

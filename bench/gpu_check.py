"""One GPU, a few minutes: is what our code computes there right, how fast is it, how much memory does it take?

    python bench/gpu_check.py [--tiny]

A random Qwen3 of 0.6B parameters (no model hub) is served, by vLLM where it is installed, else by engine.py, and goes through turns of
engine and trainer with the code that a run uses: Engines, Policy, push, probe, sleep, offload, checkpoint. What a GPU computes is held
against plain transformers on the CPU in float32. It prints one table; "WRONG" is a value beyond its bar, "FAILED" a section that ended with
an error: the others run all the same, and the exit status is 1.

--tiny, and a machine without CUDA: the very same steps on the CPU with 0.7M parameters, sharded over one rank as on a GPU. What only a GPU
has a figure for is "n/a". On a GPU it takes about 40 GB of its memory and 30 GB of the host's.
"""

from __future__ import annotations

import argparse
import inspect
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # of several, one
try:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

    import trainer
    import vllm_control
    from bench.vllm_cpu import make_tiny_model
    from config import Config
    from trajectory import Sample
except ImportError as error:
    sys.exit(f"gpu_check: {error} (requirements.txt names what is needed)")

LARGE = {"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 65_536, "rope_theta": 1e6}  # the shape of Qwen3-0.6B
HYBRID = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 128,
          "linear_value_head_dim": 128, "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": True,
          "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}  # Qwen3.5: a recurrent layer, whose rows are padded
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}  # FLOP/s in bfloat16, dense, by the maker's data sheets


class Table:
    """Rows (section, what, value, unit, bar, verdict); prints them all in the end."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, ...]] = []
        self.section, self.wrong = "", 0

    def add(self, what: str, value: float | None, unit: str = "", least: float = -math.inf, most: float = math.inf) -> None:
        bars = [f">= {least:g}"] * (least > -math.inf) + [f"<= {most:g}"] * (most < math.inf)
        fine = value is None or least <= value <= most  # NaN is not
        self.wrong += not fine
        shown = "n/a" if value is None else f"{value:,.0f}" if float(value).is_integer() else f"{value:.6g}"
        self.rows.append((self.section, what, shown, unit, " ".join(bars), ("ok" if fine else "WRONG") if bars and value is not None else ""))

    def run(self, section: str, do: Callable[[], None]) -> None:
        """A section; what it raises becomes its row."""
        self.section, start = section, time.monotonic()
        print(f"gpu_check: {section} ...", file=sys.stderr, flush=True)
        try:
            do()
        except Exception as error:  # boundary: the other sections go on
            self.wrong += 1
            last = ([line.strip() for line in str(error).splitlines() if line.strip()] or [""])[-1]
            self.rows.append((section, f"FAILED: {type(error).__name__}: {last[:200]}", "", "", "", ""))
        self.add("seconds in all", time.monotonic() - start, "s")

    def show(self) -> None:
        widths = [max(len(row[i]) for row in self.rows if not row[1].startswith("FAILED")) for i in range(6)]
        for row in self.rows:
            aligned = [cell.rjust(w) if i == 2 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))]
            print("  ".join(aligned).rstrip())


def random_rows(lengths: list[int], vocabulary: int, seed: int) -> list[Sample]:
    """Rows of several turns of random tokens, two rows a rollout; about half of the tokens are trained."""
    draw, rows = random.Random(seed), []
    for number, length in enumerate(lengths):
        mask = [False] * (length // 8)
        while len(mask) < length:
            mask += [True] * draw.randint(4, 60) + [False] * draw.randint(4, 60)
        mask = [*mask[:length - 1], True]
        rows.append(Sample([draw.randrange(3, vocabulary) for _ in mask], mask, [-7.0 if m else 0.0 for m in mask],
                           [0 if m else -1 for m in mask], rollout=f"r{number // 2}"))
    return rows


def reference(model: str, rows: list[Sample], advantages: list[float]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of the rows' trained tokens and the gradients of the policy loss, by plain transformers in float32 on the CPU: where
    sampler and trainer agree, the loss of a token is minus its advantage times its log-prob, and a rollout weighs 1 / rollouts."""
    plain, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), []
    tokens = {row.rollout: sum(r.trained_tokens for r in rows if r.rollout == row.rollout) for row in rows}
    for row, advantage in zip(rows, advantages):
        logprobs = plain(torch.tensor([row.ids])).logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(row.ids[1:])[:, None])[:, 0]
        logprobs = logprobs[torch.tensor(row.mask[1:])]
        (-advantage * logprobs.sum() / tokens[row.rollout] / len(tokens)).backward()
        found.append(logprobs.detach())
    return torch.cat(found), {name: p.grad for name, p in plain.named_parameters()}


def compare(table: Table, policy: trainer.Policy, model: str, lengths: list[int], exact: bool) -> None:
    """Log-probs and one update's gradient of a fresh policy against the reference."""
    rows = random_rows(lengths, policy.model.config.vocab_size, 1)
    advantages = [random.Random(i // 2).uniform(-1, 1) for i in range(len(rows))]
    wanted, gradients = reference(model, rows, advantages)
    for row, logprobs in zip(rows, wanted.split([row.trained_tokens for row in rows])):
        given = iter(logprobs.tolist())
        row.logprobs = [next(given) if m else 0.0 for m in row.mask]
    with torch.no_grad():
        apart = (policy.logprobs(rows)[0].cpu() - wanted).abs()
    table.add("log-probs away from CPU float32, mean", apart.mean().item(), "nats", most=1e-4 if exact else 0.05)
    table.add("log-probs away from CPU float32, most", apart.max().item(), "nats", most=1e-3 if exact else 0.5)
    metrics = policy.train([(rows, advantages)], 0)[0]
    moments = {name: policy.optimizer.state[shard]["exp_avg"].cpu() for name, shard in policy.shards.items()}  # the gradient, scaled
    alike = lambda pairs: (sum((a * b).sum() for a, b in pairs) / math.prod(sum(x.square().sum() for x in xs).sqrt() for xs in zip(*pairs))).item()  # noqa: E731
    pairs = [(moments[name], gradient) for name, gradient in gradients.items()]
    table.add("gradient: cosine with CPU float32", alike(pairs), "", least=0.9999 if exact else 0.98)
    table.add("gradient: the worst parameter's cosine", min(alike([pair]) for pair in pairs), "", least=0.999 if exact else 0.5)
    norm = sum(gradient.square().sum() for gradient in gradients.values()).sqrt().item()
    table.add("gradient: norm over that of CPU float32", metrics["grad_norm"] / norm, "", least=0.999 if exact else 0.95,
              most=1.001 if exact else 1.05)


class Check:
    """What the sections share. They run in order; each can do without those before it, but for the policy."""

    def __init__(self, table: Table, directory: Path, tiny: bool, children: vllm_control.Children) -> None:
        self.table, self.directory, self.tiny, self.children = table, directory, tiny, children
        self.device, self.cuda = "cpu" if tiny else "cuda", not tiny
        self.engines: vllm_control.Engines | None = None
        self.served, self.made = False, None
        kind = "vllm" if self.cuda and find_spec("vllm") else "embedded"
        self.config = Config(name="check", runs_dir=str(directory), model=str(directory / "model"), engine=kind, device=self.device,
                             max_context_tokens=1024, max_running=16, micro_batch_tokens=16_384 if self.cuda else 1024, lr=1e-5,
                             threads=min(os.cpu_count() or 1, 16) if self.cuda else 1,
                             # What is pushed is bfloat16 here, too, but only a GPU's trainer computes with that.
                             probe_tolerance=0.1 if self.cuda else 0.02)

    @property
    def policy(self) -> trainer.Policy:
        if not self.made:
            raise RuntimeError("it needs the trainer, whose section failed")
        return self.made

    def made_policy(self, config: Config, directory: str) -> trainer.Policy:
        ranks = trainer.Ranks()
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        load, trainer.load_scorer = trainer.load_scorer, lambda *given: load(*given[:3], True)
        try:
            policy = trainer.Policy(config, directory, ranks)
        finally:
            trainer.load_scorer = load
        policy.sharded = policy.moves = True
        policy.cpu_mesh = init_device_mesh("cpu", (1,))
        return policy

    def seconds(self, do: Callable[[], Any]) -> tuple[float, Any]:
        self.wait()
        start = time.perf_counter()
        result = do()
        self.wait()
        return time.perf_counter() - start, result

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def peak(self, phase: str) -> None:
        peak = self.policy.peak_memory()
        self.table.add(f"peak memory: {phase}", peak if self.cuda else None, "GB")

    def machine(self) -> None:
        ceiling = None
        if self.cuda:
            a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            for _ in range(3):
                a @ b
            spent, _ = self.seconds(lambda: [a @ b for _ in range(20)])
            ceiling = 20 * 2 * 8192**3 / spent / 1e12
            del a, b
            torch.cuda.empty_cache()
        self.table.add("bfloat16 matrix product", ceiling, "TFLOP/s")
        shape = {} if self.tiny else LARGE
        make_tiny_model(self.directory / "model", **shape)
        size = sum(file.stat().st_size for file in (self.directory / "model").glob("*.safetensors"))
        self.table.add("parameters", size // 4)

    def engine(self) -> None:
        self.engines = vllm_control.Engines(self.config, self.device, self.children)
        spent, _ = self.seconds(lambda: (self.engines.start(), self.engines.wait_ready()))
        self.served = True
        self.table.add("start", spent, "s")
        spent, rows = self.seconds(lambda: self.sampled(16, 64, "default"))
        self.table.add("sampled, 16 at once", sum(row.trained_tokens for row in rows) / spent, "tokens/s", least=1)

    def sampled(self, count: int, tokens: int, version: str) -> list[Sample]:
        """Rollouts of one call: `tokens` sampled after 32 random ones."""
        def one(i: int) -> Sample:
            prompt = [random.Random(i).randrange(3, 1000) for _ in range(32)]
            choice = self.engines.engines[0].post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": {
                "max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True}})["choices"][0]
            assert {span["version"] for span in choice["weight_versions"]} == {version}, choice["weight_versions"]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            return Sample(prompt + choice["token_ids"], [False] * 32 + [True] * len(logprobs), [0.0] * 32 + logprobs,
                          [-1] * 32 + [1] * len(logprobs), rollout=f"r{i}")

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))

    def trainer(self) -> None:
        if self.served:
            self.engines.pause()
            freed = self.engines.sleep()
            self.table.add("memory that the sleeping engine gave back", freed.get("engine_freed_gib"), "GiB", least=0.5)
        spent, self.made = self.seconds(lambda: self.made_policy(self.config, self.config.model))
        self.table.add("start", spent, "s")
        assert self.policy.packs, "rows are not packed"
        compare(self.table, self.policy, self.config.model, [40, 64, 100, 20, 33, 64, 80, 120], exact=self.tiny)
        self.peak("first update")

    def cycle(self) -> None:
        """Two turns: the first one pins host memory and warms up, the second one counts."""
        policy, table = self.policy, self.table
        moved = sum(tensor.nbytes for tensor in policy.moved.weights + policy.moved.moments) / 1e9
        self.hand_over(1, moved, report=False)
        rows = self.sampled(16, 64, "1") if self.served else random_rows([96] * 16, policy.model.config.vocab_size, 2)
        if self.served:
            self.engines.pause()
            spent, _ = self.seconds(self.engines.sleep)
            table.add("engine falls asleep", spent, "s")
        policy.peak_memory()
        weights = self.restore(moved)
        metrics = policy.train([(rows, [(-1.0) ** i for i in range(len(rows))])], 1)[0]
        if self.served:  # those log-probs were sampled with the very weights that were pushed
            table.add("sampler: mean of exp(trainer - sampler)", metrics["ratio_mean"], "", 0.97, 1.03)
            table.add("sampler: log-probs away from it, most", metrics["logprob_gap_max"], "nats", most=0.1 if self.tiny else 1.0)
        table.add("gradient norm", metrics["grad_norm"], "", least=1e-9)
        self.peak("update")
        self.hand_over(2, moved, report=True)
        after = policy.weights()
        table.add("weights that the update changed", sum(not torch.equal(after[name], weights[name]) for name in after) / len(after),
                  "", least=1)
        self.peak("push")

    def restore(self, moved: float) -> dict[str, torch.Tensor]:
        """Back to the GPU, timed; returns the weights as they were in host memory."""
        before = self.policy.weights()
        self.wait()
        start = time.perf_counter()
        self.policy.to_device()
        if self.cuda:
            torch.cuda.current_stream().synchronize()
        early = time.perf_counter() - start  # a forward may start
        self.wait()
        late = time.perf_counter() - start
        self.table.add("restore: weights are there", early if self.cuda else None, "s")
        self.table.add("restore: moments, too", late, "s")
        self.table.add("restore", moved / late, "GB/s")
        return before

    def hand_over(self, version: int, moved: float, report: bool) -> None:
        policy, table = self.policy, self.table
        spent, probe = self.seconds(lambda: (policy.probe(), policy.to_host())[0])
        left = sum(tensor.untyped_storage().nbytes() for tensor, _ in policy.moved.sizes)
        push = {}
        if self.served:
            policy.engines = self.engines
            complete, push = policy.push(version)
            assert complete, "an engine died in the push"
        policy.free()
        on_gpu = torch.cuda.memory_allocated() / 1e9 if self.cuda else None
        if self.served:
            waking, result = self.seconds(lambda: self.engines.resume(version, probe))  # raises PushFailed if they differ
        if report:
            table.add("offload, beside the probe", moved / spent, "GB/s")
            table.add("offload: what is left in the storages", left / 1e9, "GB", most=0)
            table.add("offload: left on the GPU after the push", on_gpu, "GB", most=0.3)
        if report and self.served:
            table.add("push", push["push_gb"], "GB", least=sum(shard.numel() for shard in policy.shards.values()) * 2 / 1e9)
            table.add("push", push["push_gb_per_second"], "GB/s")
            table.add("engine wakes and is probed", waking, "s")
            table.add("probe: engine's log-probs away from the trainer's", result["probe_gap"], "nats",
                      most=self.config.probe_tolerance)

    def speed(self) -> None:
        rows = random_rows([1024] * 32 if self.cuda else [64] * 16, self.policy.model.config.vocab_size, 3)
        self.update(rows)
        self.peak("update of 16k-token micro-batches" if self.cuda else "update")
        self.update(rows, report=True)

    def long_row(self) -> None:
        longest = 65_536 if self.cuda else 2048
        self.policy.config.micro_batch_tokens = longest
        self.policy.peak_memory()
        self.update(random_rows([longest], self.policy.model.config.vocab_size, 4), report=True)
        self.peak(f"a row of {longest} tokens")

    def update(self, rows: list[Sample], report: bool = False) -> None:
        """One update on the trainer's turn. MFU: the model's own FLOP, activation checkpointing not counted, over the data sheet's."""
        if self.served and not self.engines.engines[0].http.get("/is_sleeping").json()["is_sleeping"]:
            self.engines.pause()
            self.engines.sleep()
        self.policy.to_device()
        spent, metrics = self.seconds(lambda: self.policy.train([(rows, [(-1.0) ** i for i in range(len(rows))])], 2)[0])
        if not report:
            return
        shape, tokens = self.policy.model.config, sum(len(row.ids) for row in rows)
        head = shape.vocab_size * shape.hidden_size
        inner = sum(shard.numel() for shard in self.policy.shards.values()) - head
        attention = 6 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * sum(len(row.ids) ** 2 for row in rows)
        flop = 6 * inner * tokens + 6 * head * metrics["tokens"] + attention
        name = torch.cuda.get_device_name() if self.cuda else ""
        peak = next((peak for chip, peak in PEAK.items() if chip in name), None)
        self.table.add("tokens of the update", tokens, "")
        self.table.add("trained tokens of the update", metrics["tokens"], "")
        self.table.add("update", tokens / spent, "tokens/s", least=1)
        self.table.add("update", flop / spent / 1e12, "TFLOP/s")
        self.table.add("MFU", flop / spent / peak if peak else None, "")
        self.table.add("gradient norm", metrics["grad_norm"], "", least=1e-9)

    def hybrid(self) -> None:
        """A recurrent layer (padded rows), and a checkpoint that goes on with the same numbers."""
        where = self.directory / "hybrid"
        make_tiny_model(where)
        (where / "model.safetensors").unlink()
        torch.manual_seed(1)
        Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID)).save_pretrained(where)
        config = Config(name="hybrid", runs_dir=str(self.directory), model=str(where), device=self.device, lr=1e-4, threads=self.config.threads)
        policy = self.made_policy(config, str(where))
        compare(self.table, policy, str(where), [20, 48, 31, 64], exact=self.tiny)
        policy.to_host()
        policy.save(self.directory / "saved" / "step-000001", 1, {})
        policy.finish_saving()
        again = self.made_policy(config, str(self.directory / "saved" / "step-000001"))
        again.load(self.directory / "saved" / "step-000001")
        policy.to_device()
        rows, results = random_rows([30, 50, 40, 20], HYBRID["vocab_size"], 5), []
        for one in (policy, again):
            one.train([(rows, [1.0, 1.0, -1.0, -1.0])], 1)
            results.append(one.weights())
        apart = max((results[0][name] - value).abs().max().item() for name, value in results[1].items())
        self.table.add("checkpoint: weights apart after one more update", apart, "", most=1e-6)


def older_torch() -> str:
    """torch before 2.12 has no `enable_gqa` in its attention over packed rows, and needs none."""
    from torch.nn.attention import varlen

    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        return ""
    plain = varlen.varlen_attn
    varlen.varlen_attn = lambda *tensors, enable_gqa, **named: plain(*tensors, **named)
    return " (older than the one required: without enable_gqa)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, as where there is no CUDA")
    tiny = parser.parse_args().tiny or not torch.cuda.is_available()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    vllm_control.START_SECONDS = 150.0
    table, older = Table(), "" if tiny else older_torch()
    with tempfile.TemporaryDirectory() as directory, vllm_control.Children(Path(directory) / "logs") as children:
        check = Check(table, Path(directory), tiny, children)
        name = "CPU" if tiny else torch.cuda.get_device_name()
        print(f"{name}, torch {torch.__version__}{older}, engine: {'vLLM' if check.config.engine == 'vllm' else 'engine.py'}")
        for section in (check.machine, check.engine, check.trainer, check.cycle, check.speed, check.long_row, check.hybrid):
            table.run(section.__name__, section)
        if dist.is_initialized():
            dist.destroy_process_group()
    table.show()
    print(f"{table.wrong} wrong" if table.wrong else "all is right")
    return min(table.wrong, 1)


if __name__ == "__main__":
    sys.exit(main())

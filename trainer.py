"""The trainer: waits for groups of rollouts, makes one optimizer step of them, hands the weights to the engine.

    fit()   reads top to bottom:  collect -> pause and sleep the engine -> assemble rows -> advantages and weights
            -> update -> push the weights, wake, resume -> record (metrics, evaluation, checkpoint)
            (or, if the groups of another update are complete: the engine sleeps on)
    Policy  the model: log-probs of the trained tokens of rows, optimizer step, weights for the engine, checkpoints
    Gateway the trainer's side of the gateway's HTTP interface

Who waits for whom: the trainer waits for finished rollouts (a long poll); while it updates, the gateway holds the
harnesses' calls, so that a harness sees one slow reply. Engine and trainer take turns on the same processors.

Several processes (ranks) share the model (FSDP2): rank 0 runs fit() and alone talks HTTP; the others repeat the methods
of Policy that it calls, and wait for it in between. The same under torchrun.

Left out: tensor, context and expert parallelism; packing for recurrent layers (their rows are padded).
"""

import contextlib
import ctypes
import dataclasses
import functools
import heapq
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import accumulate, compress
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from advantage import group_advantages, policy_loss, summarize, token_weights
from config import Config, make_key, read_secret
from scheduler import Group, Scheduler, task_order
from trajectory import Sample, Turn, assemble
from vllm_control import HERE, PROBE, RESTARTS, Children, Engine, Engines, free_port, healthy, load_tokenizer, \
    push_weights

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**28}  # float32 logits of one chunk: 64 MB, 1 GB
PAGE = 200  # finished rollouts that are read at once
MICRO_BATCH_TOKENS = {"cpu": 2**10, "cuda": 2**14}


class Gateway:
    """The gateway as the trainer sees it."""

    def __init__(self, url: str, admin_key: str, check: Callable[[], None]) -> None:
        """`check` raises if the gateway is ours and has died."""
        headers, self.check = {"Authorization": f"Bearer {admin_key}"}, check
        self.url, self.http = url, httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)
        self.version = 0  # of the weights that the engine has

    def call(self, method: str, path: str, body: dict | None = None, **params: Any) -> dict:
        """Repeats what a restarting gateway did not answer; every route is idempotent."""
        for attempt in range(20):
            try:
                reply = self.http.request(method, path, json=body, params=params)
                break
            except httpx.TransportError as error:
                self.check()
                if attempt == 19:
                    raise RuntimeError(f"the gateway at {self.url} does not answer: {error}") from None
                time.sleep(0.5)
        if reply.status_code >= 400:
            raise RuntimeError(f"gateway {method} {path} answered {reply.status_code}: {reply.text[:500]}")
        return reply.json()

    def turns(self, rollout: str) -> list[dict]:
        """The logged turns of the rollout's last attempt, page by page."""
        turns, after = [], -1
        while after is not None:
            page = self.call("GET", f"/rollouts/{rollout}/turns", after=after, messages=0)
            turns, after = turns + page["turns"], page.get("next")
        return turns

    @contextlib.contextmanager
    def hold(self, lease: float = 60.0) -> Iterator[None]:
        """Model calls are held inside the block and go on after it, with the weights `self.version`. The lease is
        renewed, so that the gateway notices if we die; if the block raises, calls stay held."""
        self.call("POST", "/pause", {"lease": lease})
        over = threading.Event()

        def renew() -> None:
            with contextlib.suppress(RuntimeError):  # which the next call has, too
                while not over.wait(lease / 4):
                    self.call("POST", "/lease", {"lease": lease})

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        self.call("POST", "/resume", {"version": self.version})


class Ranks:
    """The processes that train together. Rank 0 alone runs `fit`; the others `follow` its calls of Policy's methods.

    Three groups: the default one computes (NCCL for GPU tensors, gloo for CPU tensors); `waiting` carries rank 0's
    calls, and its time-out outlasts any rollout; `saving` belongs to the thread that writes checkpoints.
    """

    def __init__(self, address: str = "", rank: int = 0, size: int = 1) -> None:
        self.rank, self.size, cuda = rank, size, torch.cuda.is_available()
        self.here = int(os.environ.get("LOCAL_RANK", rank))  # among those of this machine
        self.waiting = self.saving = None
        use_gpu(self.here)
        if (size > 1 or cuda) and not dist.is_initialized():
            meet = {"init_method": address} if address else {"store": dist.HashStore()}
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", rank=rank, world_size=size, **meet)
        if size > 1:
            self.waiting = dist.new_group(backend="gloo", timeout=timedelta(days=30))
            self.saving = dist.new_group(backend="gloo", timeout=timedelta(hours=2))

    def broadcast(self, message: Any = None) -> Any:
        """Rank 0's message, on all ranks."""
        box = [message]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self.waiting)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on all ranks."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.waiting)
        return values

    def close(self) -> None:
        """Ends the others' `follow`, and the groups."""
        if self.size > 1:
            self.broadcast()
        if dist.is_initialized():
            dist.destroy_process_group()


def use_gpu(here: int) -> None:
    """To be called in each thread that may touch a GPU, which would take the first one. `here`: see Ranks."""
    if torch.cuda.is_available():  # with --device cpu there may be more ranks than GPUs
        torch.cuda.set_device(here % torch.cuda.device_count())


def device_of(config: Config) -> str:
    return "cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu"


def start_ranks(config: Config, children: Children) -> Ranks:
    """Rank 0 of the run: under torchrun of those that it started, else of --ranks processes on this machine."""
    if "WORLD_SIZE" in os.environ:
        return Ranks("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    size = config.ranks or (torch.cuda.device_count() if config.device != "cpu" else 0) or 1
    if size == 1:
        return Ranks()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = f"tcp://127.0.0.1:{free_port()}"
    for rank in range(1, size):
        children.start(f"rank{rank}", [str(HERE / "trainer.py"), address, str(rank), str(size)])
    threading.Thread(target=watch_ranks, args=(children,), daemon=True).start()
    return Ranks(address, 0, size)


def watch_ranks(children: Children) -> None:
    """Ends the run when a rank has died and this process does not notice: whoever waits for it in a collective
    operation might wait for ever."""
    ranks = [child for child in children.children.values() if child.name.startswith("rank")]
    # One that ended as asked has status 0, one that was ended with the run -SIGTERM.
    while not (dead := [child for child in ranks if child.process.poll() not in (None, 0, -signal.SIGTERM)]):
        time.sleep(0.5)
    time.sleep(5)
    print(f"error: {dead[0].last_words()}", file=sys.stderr, flush=True)
    children.end()
    os._exit(1)


def follow(address: str, rank: int, size: int) -> None:
    """What the ranks after the first do: the calls that rank 0 makes, until it says that there are no more."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive whoever started this
    ranks = Ranks(address, rank, size)
    policy: Policy | None = None
    engines: Engines | None = None
    with Children(Path(), alone=False) as children:
        while call := ranks.broadcast():
            name, arguments = call
            if name == "Policy":
                policy = Policy(*arguments, ranks)
            elif name == "start_engines":
                engines = start_engines(*arguments, ranks, children)
            elif name != "revive":
                getattr(policy, name)(*arguments)
            elif engines:
                engines.revive(*arguments)
        if policy:
            policy.finish_saving()


def start_engines(config: Config, ranks: Ranks, children: Children) -> Engines | None:
    """Of this machine, if this rank is its first; rank 0's return value knows those of the other machines, too."""
    engines, first = None, ranks.here == 0 and not (ranks.rank and config.engine_url)
    device = device_of(config)
    if ranks.rank == 0:
        engines = Engines(config, device, children)  # makes the key that the others read
        ranks.broadcast(("start_engines", (plain(config),)))
    elif first:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing, but tells how rank 0's machine is reached
            engines = Engines(config, device, children, s.getsockname()[0])
        children.directory = config.run_dir.absolute() / f"rank{ranks.rank}"
    if engines:
        engines.start()
    urls = [url for found in ranks.gather(engines.urls if engines else [])[1:] for url in found]
    if ranks.rank == 0:
        engines.engines += [Engine(url, engines.key, revivable=True) for url in urls]
    return engines


def on_all_ranks(method: Callable) -> Callable:
    """A method of Policy that runs on every rank, with the same arguments, when rank 0 calls it."""
    @functools.wraps(method)
    def call(policy: "Policy", *arguments: Any) -> Any:
        if policy.ranks.rank == 0:
            policy.ranks.broadcast((method.__name__, arguments))
        return method(policy, *arguments)
    return call


def plain(config: Config) -> Config:
    """Without a recipe's own settings, whose class the other ranks do not know."""
    return Config(**{field.name: getattr(config, field.name) for field in dataclasses.fields(Config)})


class Scorer(torch.nn.Module):
    """The model with the log-probs as its output, so that FSDP has the output layer at hand where they are taken."""

    def __init__(self, model: torch.nn.Module, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, ids: torch.Tensor, at: torch.Tensor, targets: torch.Tensor | None,
                packing: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """`at` [N]: places in `ids`, flattened, of the state before each trained token; `targets` [N]: that token.
        Without targets: log-probs [N, V] of all tokens at temperature 1, and the states."""
        hidden = self.model.base_model(input_ids=ids, use_cache=False, **packing).last_hidden_state.flatten(0, 1)[at]
        head = self.model.get_output_embeddings()
        if targets is None:
            return head(hidden).float().log_softmax(-1), hidden
        return chunked_logprobs(hidden, targets, head, self.temperature)


def load_scorer(directory: str, config: Config, device: torch.device, sharded: bool) -> Scorer:
    """The model of a directory in float32, its blocks and the rest sharded over the ranks (GPU: bfloat16 compute)."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register("packed_rows", packed_attention)
    shape = AutoConfig.from_pretrained(directory)
    shape.get_text_config().attention_dropout = 0.0  # the sampler has none either
    # In the file's own precision at first: in float32, all ranks of a machine would have one whole copy each.
    model = AutoModelForCausalLM.from_pretrained(directory, config=shape, dtype="auto").train()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model.config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"--model {directory!r} sets {name}, which the trainer's log-probs do not apply")
    kind = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if model._supports_attention_backend and not model._is_stateful and kind <= {"full_attention", "sliding_attention"}:
        model.set_attn_implementation("packed_rows")
    if config.activation_checkpointing == "on" or config.activation_checkpointing == "auto" and device.type == "cuda":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    scorer = Scorer(model, config.temperature)
    if sharded:
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device.type == "cuda" else None
        options = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
                   **({"mp_policy": precision} if precision else {})}
        for block in model.base_model.layers:
            fully_shard(block.float(), **options)
        fully_shard(scorer.float(), reshard_after_forward=False, **options)
    return scorer.float()


class Policy:
    """The trained model with its optimizer: float32 masters, sharded over the ranks."""

    def __init__(self, config: Config, directory: str, ranks: Ranks | None = None) -> None:
        from transformers import AutoConfig
        from transformers.utils import logging

        logging.disable_progress_bar()
        self.config, self.ranks = config, ranks or Ranks()
        if self.ranks.rank == 0:
            self.ranks.broadcast(("Policy", (plain(config), directory)))
        self.device = torch.device(device_of(config))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks.size))
        torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // here))
        torch.manual_seed(config.seed)
        self.tokenizer = load_tokenizer(config)
        self.sharded = self.ranks.size > 1 or self.device.type == "cuda"
        self.cpu_mesh = init_device_mesh("cpu", (self.ranks.size,)) if self.sharded else None
        self.scorer = load_scorer(directory, config, self.device, self.sharded)
        self.model = self.scorer.model
        self.packs = self.model.config._attn_implementation == "packed_rows"
        served = AutoConfig.from_pretrained(config.model)  # whose names the push uses: a vision-language one nests them
        self.base = "model." if served.get_text_config() is served else "model.language_model."
        self.reference = None
        if config.kl_coef:  # always the starting model, in a resumed run too
            self.reference = load_scorer(config.model, config, self.device, self.sharded).requires_grad_(False)
        # The optimizer knows each rank's own part as a plain tensor, which shares its memory with the model's.
        self.shards = {name: local(p).detach() for name, p in self.model.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.shards.values(), lr=config.lr, weight_decay=config.weight_decay,
                                           betas=(config.adam_beta1, config.adam_beta2), fused=True)
        for shard in self.shards.values():  # made now, so that what is moved, saved and loaded is always the same
            self.optimizer.state[shard] = {"step": torch.zeros((), device=self.device),
                                           "exp_avg": torch.zeros_like(shard), "exp_avg_sq": torch.zeros_like(shard)}
        states = [value for state in self.optimizer.state.values() for value in state.values() if value.dim()]
        frozen = [local(p).detach() for p in self.reference.parameters()] if self.reference else []
        self.moved = Offload([*self.shards.values(), *frozen], states)
        self.moves = self.device.type == "cuda"  # CPUs have but one memory
        self.engines: Engines | None = None  # which rank 0 speaks to
        self.pushed: dict[str, torch.Tensor] = {}  # bfloat16 shards that stay on the GPU until they are pushed
        self.writer = ThreadPoolExecutor(1, initializer=use_gpu, initargs=(self.ranks.here,))
        self.written: Future = self.writer.submit(int)  # begins the thread: a signal while it begins would lose it

    def logprobs(self, rows: list[Sample], scorer: Scorer | None = None,
                 every: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs at the sampling temperature and entropies of the rows' trained tokens, row after row: [N], [N].
        `every`: instead those of all tokens in their place at temperature 1, [N, V].

        Rows are laid one after the other where attention can keep them apart, else padded: the state of a recurrent
        layer would leak into the next row. What pads comes after the row, so that nothing before it reads it.
        """
        lengths, packing = [len(row.ids) for row in rows], {}
        width = 0 if self.packs else max(lengths)
        starts = [i * width for i in range(len(rows))] if width else [0, *accumulate(lengths)][:-1]
        at = torch.tensor([start + i - 1 for start, row in zip(starts, rows) for i, m in enumerate(row.mask) if m])
        ids, at = [token for row in rows for token in row.ids + [0] * (width - len(row.ids))], at.to(self.device)
        ids_BT = torch.tensor(ids, device=self.device).view(-1, width or len(ids))
        if self.packs:
            bounds = torch.tensor([*starts, len(ids)], dtype=torch.int32, device=self.device)
            positions = torch.cat([torch.arange(length, device=self.device) for length in lengths])
            packing = {"position_ids": positions[None], "packed": (lengths, bounds)}
        return (scorer or self.scorer)(ids_BT, at, None if every else ids_BT.flatten()[at + 1], packing)

    @on_all_ranks
    @torch.no_grad()
    def probe(self) -> torch.Tensor:
        """What the engines' log-probs are held against: those of all tokens after each prompt of PROBE, [8, V]."""
        if self.moves:
            self.moved.leave()  # the hand-over begins: the moments are not needed any more
        rows = [Sample([*ids, 0], [False] * len(ids) + [True], [0.0] * (len(ids) + 1), [-1] * (len(ids) + 1))
                for ids in PROBE]
        return self.logprobs(rows, every=True)[0].cpu()

    def micro_batches(self, rows: list[Sample]) -> list[tuple[list[int], bool]]:
        """This rank's micro-batches (indices of rows), as many as every other rank's, whose turns it shares. Where
        there are too few rows, it runs a short one that does not count (False)."""
        lengths = [len(row.ids) for row in rows]
        budget = self.config.micro_batch_tokens or MICRO_BATCH_TOKENS[self.device.type]
        batches = split_rows(lengths, self.ranks.size, budget, self.packs)
        spare = lengths.index(min(lengths))
        return [(batch or [spare], bool(batch)) for batch in batches[self.ranks.rank::self.ranks.size]]

    @torch.no_grad()
    def old_logprobs(self, rows: list[Sample]) -> dict[int, torch.Tensor]:
        """Log-probs of the trained tokens of this rank's rows under the present weights, by index of the row."""
        old: dict[int, torch.Tensor] = {}
        for batch, _ in self.micro_batches(rows):
            values = self.logprobs([rows[i] for i in batch])[0].split([rows[i].trained_tokens for i in batch])
            old.update(zip(batch, values))
        return old

    @on_all_ranks
    def train(self, batches: list[tuple[list[Sample], list[float]]], step: int) -> list[dict[str, float]]:
        """One optimizer step for each batch of (rows, advantage of each row); `step`: of the weights before it."""
        rate = self.set_learning_rate(step + 1)
        olds = [self.old_logprobs(rows) if len(batches) > 1 else None for rows, _ in batches]
        return [self.update(rows, advantages, step, old) | {"lr": rate}
                for (rows, advantages), old in zip(batches, olds)]

    def update(self, rows: list[Sample], advantages: list[float], version: int,
               old: dict[int, torch.Tensor] | None = None) -> dict[str, float]:
        """One optimizer step on the rows of whole groups; returns metrics.

        `advantages` [S] is the one of each row's rollout, `version` the present weights' label. `old`
        are the log-probs before the update, for each row; None where this is the first step on these weights, so
        that they are those of this very forward. The weight of each token is fixed
        here, before the rows are split into micro-batches: the gradient does not depend on the split.
        """
        c, on = self.config, self.device
        weights = token_weights([row.trained_tokens for row in rows], [row.rollout for row in rows],
                                c.loss_normalization, c.loss_horizon)
        parts = []
        for batch, counts in self.micro_batches(rows):
            part = [rows[i] for i in batch]
            with torch.no_grad():
                reference = self.logprobs(part, self.reference)[0] if self.reference else None
            logprobs, entropy = self.logprobs(part)
            if not counts:
                (logprobs.sum() * 0).backward()
                continue
            row_of = torch.repeat_interleave(torch.tensor([row.trained_tokens for row in part])).to(on)  # [N]
            sampler = torch.tensor([x for row in part for x, m in zip(row.logprobs, row.mask) if m], device=on)
            loss, metrics = policy_loss(
                logprobs, logprobs.detach() if old is None else torch.cat([old[i] for i in batch]), sampler,
                torch.tensor([advantages[i] for i in batch], device=on)[row_of], weights[batch].to(on)[row_of],
                rows=row_of, ref_logprobs=reference, ratio=c.ratio, clip_low=c.clip_low,
                clip_high=c.clip_high, dual_clip=c.dual_clip, importance=c.importance, importance_cap=c.importance_cap,
                kl_coef=c.kl_coef)
            (loss * self.ranks.size).backward()  # FSDP averages the ranks' gradients
            # Trainer against sampler on unchanged weights: what is not 0 (ratio: 1) is a numerical or a plumbing error.
            same = torch.tensor([v == version for row in part for v, m in zip(row.versions, row.mask) if m], device=on)
            gap = (logprobs.detach() - sampler)[same]
            parts.append(metrics | {"loss": loss.detach(), "entropy_sum": entropy.sum(), "same_version": same.sum(),
                                    "ratio_sum": gap.exp().sum(),
                                    "logprob_gap_max": gap.abs().max() if len(gap) else same.sum()})
        norm = self._step()
        numbers = [{name: float(value) for name, value in part.items()} for part in parts]
        result = summarize(part for rank in self.ranks.gather(numbers) for part in rank) | {"grad_norm": norm}
        ratio, gap, same = result.pop("ratio_mean"), result.pop("logprob_gap_max"), result["same_version"]
        return result | ({"ratio_mean": ratio * result["tokens"] / same, "logprob_gap_max": gap} if same else {})

    def _step(self) -> float:
        """Clips the gradients and makes the optimizer step; returns their norm over all ranks."""
        for shard, p in zip(self.shards.values(), self.model.parameters()):
            shard.grad, p.grad = None if p.grad is None else local(p.grad), None
        grads = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        square = torch.nn.utils.get_total_norm(grads).square()
        if self.ranks.size > 1:
            dist.all_reduce(square)
        norm = square.sqrt()
        if not torch.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm.item()}: no update was made")
        torch.nn.utils.clip_grads_with_norm_(self.shards.values(), self.config.max_grad_norm, norm)
        self.moved.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()

    def set_learning_rate(self, step: int) -> float:
        """Linear warm-up to `lr`, then constant or linear to a tenth at the last step. `step` counts from 1."""
        c = self.config
        rate = c.lr * min(1.0, step / max(c.lr_warmup_steps, 1))
        if c.lr_decay == "linear":
            rate *= 1 - 0.9 * max(0.0, step - c.lr_warmup_steps) / max(c.steps - c.lr_warmup_steps, 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _reshard(self) -> None:
        """To be called before the parameters are read: after a forward alone, the root's are still whole."""
        for scorer in (self.scorer, self.reference) if self.sharded else ():
            if scorer:
                scorer.reshard()

    @on_all_ranks
    def to_device(self) -> None:
        """The trainer's turn: weights and optimizer come back to the GPU."""
        self.moved.restore()

    @on_all_ranks
    def to_host(self) -> None:
        """The engine's turn is next: only the bfloat16 shards to push stay on the GPU, until `free`."""
        if self.moves:
            self._reshard()
            torch.cuda.empty_cache()  # else the shards to push would hold on to parts of what the update has left
            self.pushed = {name: p.detach().bfloat16() for name, p in self.model.named_parameters()}
            self.moved.offload()
            torch.cuda.empty_cache()

    @on_all_ranks
    def free(self) -> None:
        self.pushed = {}
        torch.cuda.empty_cache()

    @on_all_ranks
    def push(self, version: int) -> tuple[bool, dict[str, float]]:
        """The weights to the engines, gathered tensor by tensor; whether all engines have them, and metrics."""
        weights = lambda: ((name.replace("model.", self.base, 1), self.pushed.get(name, p.detach()))  # noqa: E731
                           for name, p in self.model.named_parameters())
        return push_weights(self.engines, weights, version, self.config, self.device.type)

    @on_all_ranks
    def peak_memory(self) -> float:
        """GB at most since the last call, of the GPU memory of any rank (CPU: of the process, since its start)."""
        if self.device.type == "cpu":
            return max(self.ranks.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6))
        peak = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return max(self.ranks.gather(peak))

    def _state(self) -> dict[str, torch.Tensor]:
        """Copies in host memory of weights and moments, as parts of their whole (DTensor) where there are ranks."""
        self._reshard()
        self.moved.finish()
        state = {}
        for (name, shard), p in zip(self.shards.items(), self.model.parameters()):
            for kind, tensor in {"weight": shard, **self.optimizer.state[shard]}.items():
                if kind == "step":
                    continue
                copied = self.moved.content(tensor).cpu().clone()
                if isinstance(p, DTensor):
                    copied = DTensor.from_local(copied, self.cpu_mesh, p.placements, run_check=False, shape=p.shape,
                                                stride=p.stride())
                state[f"{kind}.{name}"] = copied
        return state

    def _whole(self, state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Whole weights by their Hugging Face names, on rank 0. A tied output layer is the embedding, named once."""
        whole = {}
        for name in self.shards:
            weight = state[f"weight.{name}"].to(dtype)
            weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
            whole |= {name: weight} if self.ranks.rank == 0 else {}
        return whole

    @on_all_ranks
    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of the whole weights in host memory, on rank 0."""
        return self._whole(self._state(), torch.float32)

    @on_all_ranks
    def save(self, directory: Path, keep: int, extra: dict[str, Any]) -> None:
        """Weights, optimizer, RNG and `extra` as a checkpoint, and a Hugging Face export beside them. They are copied
        now and written in the background, aside, then renamed: a kill leaves the older one. `keep`: of the newest."""
        self.finish_saving()
        state = self._state()
        export = self._whole(state, torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        rng = {"torch": torch.get_rng_state(), "python": random.getstate()}
        steps = int(next(iter(self.optimizer.state.values()))["step"])
        extra = {"rng": rng, "optimizer_steps": steps, **extra}
        self.written = self.writer.submit(self._write, directory, keep, state, export, extra)

    def _write(self, directory: Path, keep: int, state: dict, export: dict, extra: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        aside = directory.with_name(directory.name + ".writing")
        if self.ranks.rank == 0:
            for left in directory.parent.glob("*.writing"):
                shutil.rmtree(left)
            self.model.save_pretrained(aside, state_dict=export)
            self.tokenizer.save_pretrained(aside)
        if self.ranks.size > 1:
            dist.barrier(self.ranks.saving)
        with warnings.catch_warnings(action="ignore"):  # "torch.distributed is uninitialized"
            dcp.save(state, checkpoint_id=aside / "shards", process_group=self.ranks.saving,
                     no_dist=self.ranks.size == 1)
        if self.ranks.rank == 0:  # whose save ends only when all ranks have written
            torch.save(extra, aside / "trainer.pt")
            aside.rename(directory)
            for old in sorted(directory.parent.glob("step-??????"))[:-keep]:  # also what a kill left of one
                shutil.rmtree(old)

    def finish_saving(self) -> None:
        """Waits for the checkpoint that is being written; RuntimeError if it could not be."""
        if error := self.written.exception():  # torch's own is a BaseException, and hides what the system said
            free = shutil.disk_usage(self.config.run_dir).free / 1e9
            raise RuntimeError("the checkpoint could not be written; the one before it is whole. Is the disk full "
                               f"({free:.1f} GB are free), or a quota? {str(error).strip().splitlines()[-1:]}")

    @on_all_ranks
    def load(self, directory: Path) -> dict[str, Any]:
        """Weights, optimizer and RNG of a checkpoint, of however many ranks; returns the rest of its state."""
        import torch.distributed.checkpoint as dcp

        state = self._state()
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, checkpoint_id=directory / "shards", no_dist=self.ranks.size == 1)
        extra = torch.load(directory / "trainer.pt", map_location="cpu", weights_only=False)
        for name, shard in self.shards.items():
            for kind, tensor in {"weight": shard, **self.optimizer.state[shard]}.items():
                if kind == "step":
                    tensor.fill_(extra["optimizer_steps"])
                else:
                    tensor.copy_(local(state[f"{kind}.{name}"]))
        torch.set_rng_state(extra["rng"]["torch"])
        random.setstate(extra["rng"]["python"])
        return extra


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Offload:
    """Tensors whose memory is given back while someone else has the GPU; their content waits in (pinned) host memory.

    Copies run on a stream of their own, beside what the trainer computes (a CPU's streams do nothing):

        restore    weights come back, then moments        a forward waits for the weights alone, `finish` for all
        leave      moments go                             meanwhile the weights may be read
        offload    moments, if they have not left, and weights go; then all memory is given back

    Storages are emptied and filled in place, so that every view of the tensors stays valid, those of FSDP too. They
    belong to the main stream, and only change their size when the copies are over.
    """

    def __init__(self, weights: list[torch.Tensor], moments: list[torch.Tensor]) -> None:
        self.weights, self.moments, self.host = weights, moments, {}  # host: copies by id
        self.sizes = [(tensor, tensor.untyped_storage().nbytes()) for tensor in weights + moments]
        self.away = self.leaving = False
        self.on = torch.get_device_module(weights[0].device)
        self.aside = self.on.Stream()

    def content(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor's values, wherever they are."""
        return self.host[id(tensor)] if self.away else tensor

    def leave(self) -> None:
        if not self.leaving:
            self._copy(self.moments, out=True)
            self.leaving = True

    def offload(self) -> None:
        self.leave()
        self._copy(self.weights, out=True)
        self.on.synchronize()
        for tensor, _ in self.sizes:
            tensor.untyped_storage().resize_(0)
        self.away, self.leaving = True, False

    def restore(self) -> None:
        if not self.away:
            return
        for tensor, size in self.sizes:
            tensor.untyped_storage().resize_(size)
        self._copy(self.weights, out=False)
        self.on.current_stream().wait_stream(self.aside)
        self._copy(self.moments, out=False)
        self.away = False

    def finish(self) -> None:
        """To be called before the moments are used or anything is written: what was copied out before is out of date
        then."""
        self.on.current_stream().wait_stream(self.aside)
        self.leaving = False

    def _copy(self, tensors: list[torch.Tensor], out: bool) -> None:
        self.aside.wait_stream(self.on.current_stream())
        with self.on.stream(self.aside):
            for tensor in tensors:
                if id(tensor) not in self.host:  # pinned once, for the run: pinning takes longer than copying
                    self.host[id(tensor)] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                to, of = (self.host[id(tensor)], tensor) if out else (tensor, self.host[id(tensor)])
                to.copy_(of, non_blocking=True)


def split_rows(lengths: list[int], ranks: int, budget: int, packed: bool) -> list[list[int]]:
    """Indices of rows in micro-batches of at most `budget` tokens (`packed`: of their sum, else with their padding).

    Their number is a multiple of `ranks` (some may be empty); neighbours, which ranks run at the same time, cost alike.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if not packed:
        batches: list[list[int]] = []
        for i in order:
            if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
                batches[-1].append(i)
            else:
                batches.append([i])
        while len(batches) % ranks:
            large = max(range(len(batches)), key=lambda b: len(batches[b]))
            half = -(-len(batches[large]) // 2)
            batches[large:large + 1] = [batches[large][:half], batches[large][half:]]
            batches.sort(key=lambda batch: -len(batch) * lengths[batch[0]] if batch else 0)
        return batches
    count = -(-sum(lengths) // budget)
    while True:  # the longest row first, each into the emptiest of a few bins
        count = -(-count // ranks) * ranks
        bins = [(0, b, []) for b in range(count)]
        for i in order:
            load, b, members = heapq.heappop(bins)
            heapq.heappush(bins, (load + lengths[i], b, members + [i]))
        if max(load for load, _, _ in bins) <= max(budget, lengths[order[0]]):
            return [members for _, _, members in sorted(bins, key=lambda bin: -bin[0])]
        count += 1


def packed_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None,
                     scaling: float | None = None, sliding_window: int | None = None, packed: Any = None,
                     **rest: Any) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, N, D], key and value [1, K, N, D] -> [1, N, H, D]; each row sees
    itself alone. `packed`: lengths and bounds of the rows. On a GPU one kernel for all of them, which computes in
    bfloat16 or float16 only (float32 ends with its RuntimeError); on a CPU row by row."""
    if packed is None:  # padded rows
        parts, rows = [(query, key, value)], [query.shape[2]]
    elif query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        (lengths, bounds), longest = packed, max(packed[0])
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scaling, window_size=window,
                           enable_gqa=True)[None], None
    else:
        rows = packed[0]
        parts = list(zip(*(t.split(rows, dim=2) for t in (query, key, value))))
    out = []
    for length, (q, k, v) in zip(rows, parts):
        seen = None
        if sliding_window is not None and sliding_window < length:
            at = torch.arange(length, device=q.device)
            seen = (at <= at[:, None]) & (at > at[:, None] - sliding_window)
        out.append(torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=True))
    return torch.cat(out, dim=2).transpose(1, 2), None


class ChunkedLogprobs(torch.autograd.Function):
    """Log-probs and entropies, a chunk of the logits in memory at a time; the backward computes them again."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float,
                size: int) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, norms = (torch.empty(len(targets), device=hidden.device) for _ in range(3))
        for start in range(0, len(targets), size):
            part = slice(start, start + size)
            logits = (hidden[part] @ weight.t()).float().div_(temperature)  # (n, V)
            largest = logits.amax(-1)
            probs = logits.sub_(largest[:, None]).exp()  # not normalized
            total = probs.sum(-1)
            norms[part] = largest + total.log()
            logprobs[part] = logits.gather(-1, targets[part, None])[:, 0] - total.log()
            entropies[part] = total.log() - probs.mul_(logits).sum(-1) / total
            del logits, probs  # before the next ones are made
        ctx.save_for_backward(hidden, weight, targets, norms)
        ctx.temperature, ctx.size = temperature, size
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, targets, norms = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(targets), ctx.size):
            part = slice(start, start + ctx.size)
            probs = (hidden[part] @ weight.t()).float().div_(ctx.temperature).sub_(norms[part, None]).exp_()
            probs *= -grad[part, None] / ctx.temperature  # (n, V), the gradient of the logits from here on
            probs.scatter_add_(-1, targets[part, None], grad[part, None] / ctx.temperature)
            probs = probs.to(weight.dtype)
            grad_hidden[part] = probs @ weight
            grad_weight.addmm_(probs.t(), hidden[part])
            del probs
        return grad_hidden, grad_weight, None, None, None


def chunked_logprobs(hidden: torch.Tensor, targets: torch.Tensor, head: torch.nn.Module,
                     temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets` [N] and entropies [N] from the states [N, D] before them, at `temperature`.

    In chunks of at most CHUNK_LOGITS logits, computed again in the backward: the extra memory is that of two chunks
    (logits and probabilities), however many tokens there are.
    """
    assert head.bias is None, "an output layer with a bias"
    size = max(1, CHUNK_LOGITS[hidden.device.type] // head.weight.shape[0])
    return ChunkedLogprobs.apply(hidden, head.weight, targets, temperature, size)


class Log:
    """Metrics of the run: `metrics.jsonl`, a console table (a line a step), a progress line, and wandb."""

    COLUMNS = {"step": "step", "reward_mean": "reward", "eval_reward": "eval", "staleness_max": "stale",
               "groups_skipped": "skipped", "turns": "turns", "rows": "rows", "trained_tokens": "tokens",
               "logprob_gap_max": "gap", "grad_norm": "grad norm", "entropy_mean": "entropy",
               "seconds_rollout": "rollout s", "seconds_update": "update s", "seconds_total": "total s"}

    def __init__(self, config: Config, step: int) -> None:
        """`step`: of the checkpoint that the run goes on from; what the file says of later ones is dropped."""
        path = config.run_dir / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # a torn last line is no record
        lines = [line for line in lines if json.loads(line)["step"] <= step]
        self.last = json.loads(lines[-1])["step"] if lines else -1  # that is in the file
        (aside := path.with_suffix(".new")).write_text("".join(line + "\n" for line in lines))
        self.file = aside.replace(path).open("a")
        self.terminal, self.lines = sys.stdout.isatty(), 0
        mode = config.wandb if config.wandb != "auto" else "online" if os.environ.get("WANDB_API_KEY") else "offline"
        self.wandb: Any = None
        if mode != "disabled":
            os.environ.setdefault("WANDB_SILENT", "true")
            import wandb

            self.wandb = wandb.init(project=config.wandb_project, name=config.name, id=config.name, resume="allow",
                                    mode=mode, dir=config.run_dir, config=dataclasses.asdict(config),
                                    settings=wandb.Settings(silent=True))

    def say(self, text: str) -> None:
        print(("\r\033[K" if self.terminal else "") + text, flush=True)

    def progress(self, text: str) -> None:
        """A line that the next one replaces; nothing where the output is not a terminal."""
        if self.terminal:
            print(f"\r\033[K{text[:os.get_terminal_size().columns - 1]}", end="", flush=True)

    def step(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log({name: x for name, x in record.items() if name != "trained"}, step=record["step"])
        if self.lines % 20 == 0:
            self.say(" ".join(f"{title:>9}" for title in self.COLUMNS.values()))
        self.lines += 1
        cells = [record.get(name, "") for name in self.COLUMNS]
        self.say(" ".join(f"{x:>9.3g}" if isinstance(x, float) and x < 1000 else f"{x:>9}" for x in cells))

    def close(self) -> None:
        self.file.close()
        if self.wandb:
            self.wandb.finish()


class Run:
    """What a run holds beside the policy: its services, its scheduler, and what happened since the last step."""

    def __init__(self, config: Config, train_tasks: list[dict], eval_tasks: list[dict], children: Children, log: Log,
                 scheduler: Scheduler, ranks: Ranks) -> None:
        self.config, self.children, self.log, self.scheduler, self.ranks = config, children, log, scheduler, ranks
        self.train_tasks, self.eval_tasks = train_tasks, eval_tasks[:config.eval_tasks or None]
        self.began = int(time.time())  # in the ids of evaluation groups: a resumed run does not meet the old ones
        self.seq = 0  # of the last finished rollout that was read
        self.records: list[dict] = []  # training rollouts that finished since the last step
        self.evaluated: list[dict] = []  # finished rollouts of the present evaluation
        self.seen_calls, self.skipped = False, 0  # any; groups skipped up to the last step

    def start_services(self) -> None:
        """Engine and gateway, unless their URLs are given."""
        c, children = self.config, self.children
        secret_file = Path(c.secret_file or c.run_dir / "secret").absolute()
        key = make_key(read_secret(secret_file), "admin")
        self.engines = start_engines(c, self.ranks, children)
        gateway_url = c.gateway_url.rstrip("/") or f"http://127.0.0.1:{c.gateway_port or free_port()}"
        if not c.gateway_url:
            children.start("gateway", [
                str(HERE / "gateway.py"), "--run-dir", str(c.run_dir.absolute()), "--engine-url",
                ",".join(self.engines.urls), "--engine-key-file", str(self.engines.key_file),
                "--secret-file", str(secret_file), "--tokenizer", c.model, "--history", c.history,
                "--port", gateway_url.rsplit(":", 1)[1]])
        self.gateway, self.secret_file = Gateway(gateway_url, key, lambda: children.check(but="engine")), secret_file

    def wait_for_engines(self) -> None:
        """Until they answer; then the controller starts. To be called under `gateway.hold()`: they have the original
        weights, and rollouts may be waiting."""
        c, children, gateway_url = self.config, self.children, self.gateway.url
        self.engines.wait_ready()
        if c.start_controller:
            parts = [part for task in [*self.train_tasks, *self.eval_tasks] for part in
                     (task["agent"]["harness"], task["verifier"]["verify"]) if isinstance(part, str)]
            modules = ",".join(sorted({part.partition(":")[0] for part in parts}))
            children.start("controller", [
                str(HERE / "controller.py"), "--gateway-url", gateway_url, "--secret-file", str(self.secret_file),
                "--run-dir", str(c.run_dir.absolute()), "--max-running", str(c.max_running), "--preload", modules])

    def post_group(self, group: str, task: dict, kind: str, rollouts: int, temperature: float) -> list[str]:
        c = self.config
        return self.gateway.call("POST", "/rollouts", {
            "group": group, "n": rollouts, "task": task, "kind": kind, "timeout": c.rollout_timeout,
            "max_attempts": c.max_attempts, "on_failure": c.on_failure, "context_limit": c.max_context_tokens,
            "sampling": {"temperature": temperature, "max_tokens": c.max_response_tokens}})["rollouts"]

    def start_evaluation(self, step: int) -> None:
        n, temperature = self.config.eval_rollouts_per_task, self.config.eval_temperature
        ids = [id for i, task in enumerate(self.eval_tasks)
               for id in self.post_group(f"eval.{step}.{i}.{self.began}", task, "eval", n, temperature)]
        self.scheduler.evaluation_started(ids, time.monotonic())

    def engine_due(self, step: int) -> bool:
        """Whether the engines must have the weights of this step: they are evaluated, or the last."""
        return step >= self.config.steps or step % (self.config.eval_every or float("inf")) == 0

    def eval_metrics(self) -> dict[str, float]:
        """Mean reward and the verifier's own metrics over the evaluation; a rollout without a reward counts 0."""
        sums: Counter[str] = Counter()
        for record in self.evaluated:
            sums.update({"reward": record["reward"] or 0.0, **(record["metrics"] or {})})
        count, self.evaluated = len(self.evaluated), []
        means = {f"eval_{name}": value / count for name, value in sums.items()}
        return means | ({"eval_rollouts": count} if count else {})

    def poll(self, training: bool = True) -> None:
        """One turn of the loop: starts groups, reads finished rollouts, looks after the processes."""
        for group in self.scheduler.to_start() if training else []:
            task = self.train_tasks[task_order(self.config.seed, len(self.train_tasks), group.k)]
            self.post_group(group.id, task, "train", self.config.rollouts_per_group, self.config.temperature)
            self.scheduler.group_started(group, time.monotonic())
        more = True
        while more:  # all there are, before anything is decided
            page = self.gateway.call("GET", "/finished", after=self.seq, wait=1, limit=PAGE)
            self.seq, more = page["seq"], len(page["rollouts"]) == PAGE
            for record in page["rollouts"]:
                outcome = self.scheduler.rollout_finished(record, time.monotonic())
                if outcome == "evaluation":
                    self.evaluated.append(record)
                elif record["kind"] == "train" and outcome not in ("late", "duplicate", "known", "abandoned"):
                    self.records.append(record)
            self._check_calls(page["rollouts"])
        self.children.check(but="engine")
        self.engines.look()
        if self.engines.dead():
            with self.gateway.hold():
                self.revive_engines()
                self.switch_to_trainer()
                self.policy.to_device()
                self.hand_over(self.policy, self.gateway.version)

    def collect(self, step: int, training: bool) -> tuple[list[Group], str]:
        """Polls until there are groups to train and no evaluation runs (`training` false: only the latter)."""
        while True:
            # This also ends what is overdue.
            groups, why = self.scheduler.ready_to_update(time.monotonic(), more=not self.engine_due(step + 1))
            groups, why = (groups, why) if training else ([], "the last evaluation")
            if groups or not training and not self.scheduler.evaluating:
                return groups, why
            if self.scheduler.stop_reason() and not self.scheduler.evaluating:
                raise RuntimeError(f"step {step + 1} cannot be filled: {self.scheduler.stop_reason()}; "
                                   f"{self.failures() or 'none failed'}")
            self.log.progress(f"step {step + 1} of {self.config.steps}: {len(self.records)} rollouts are done; {why}")
            self.poll(training)

    def failures(self) -> str:
        """How many of the last rollouts did not succeed, and the commonest reason."""
        reasons = Counter(record["reason"] for record in self.records if record["status"] != "succeeded")
        count, commonest = sum(reasons.values()), (reasons.most_common(1) or [("", 0)])[0][0]
        return f"{count} rollouts did not succeed, most often: {commonest}" if count else ""

    def rollout_metrics(self) -> dict[str, float]:
        """Of the training rollouts that finished since the last step; cumulative counts of drops (total_*)."""
        if self.failures():
            self.log.say(self.failures())
        rewards = [record["reward"] for record in self.records if record["reward"] is not None]
        totals = self.scheduler.counts + Counter(self.gateway.call("GET", "/state")["counts"])
        skipped = self.groups_skipped()
        result = {**({"reward_mean": sum(rewards) / len(rewards)} if rewards else {}), "rollouts": len(self.records),
                  "failed": sum(record["status"] == "failed" for record in self.records),
                  "groups_skipped": skipped - self.skipped, "engine_restarts": self.engines.restarts,
                  **{f"total_{name}": n for name, n in sorted(totals.items())}}
        self.records, self.skipped = [], skipped
        return result

    def groups_skipped(self) -> int:
        return sum(n for name, n in self.scheduler.counts.items() if name.startswith("groups_skipped"))

    def _check_calls(self, records: list[dict]) -> None:
        self.seen_calls = self.seen_calls or any(record["calls"] for record in records)
        if not self.seen_calls and len(self.records) >= self.config.rollouts_per_group:
            raise RuntimeError(
                f"no model calls seen: {len(self.records)} rollouts are over and none called the model. Does the "
                "harness take its URL from OPENAI_BASE_URL or ANTHROPIC_BASE_URL? The last one: "
                f"{self.records[-1]['status']}, {self.records[-1]['reason']}")

    def switch_to_trainer(self) -> dict[str, float]:
        """Engines asleep, nothing in flight. To be called under `gateway.hold()`."""
        self.engines.pause()
        idle = lambda: self.gateway.call("GET", "/state")["in_flight"] == 0  # noqa: E731
        self.children.wait_until(idle, "the last generation", 60, but="engine")
        return self.engines.sleep()

    def hand_over(self, policy: Policy, version: int) -> dict[str, float]:
        """The trainer's turn is over: its weights go to the sleeping engines, which wake. An engine that died in the
        meantime is started again first, which takes the GPU free."""
        self.policy, self.gateway.version = policy, version
        policy.engines, probe = self.engines, policy.probe()
        while True:
            policy.to_host()
            complete, metrics = policy.push(version)
            policy.free()
            if complete:
                return metrics | self.engines.resume(version, probe)
            self.revive_engines()
            self.engines.sleep()
            policy.to_device()

    def revive_engines(self) -> None:
        """They have the model's original weights then: calls must be held until they have the current ones."""
        dead = self.engines.dead()
        self.log.say(f"engine {', '.join(dead)} ended; starting it again ({self.engines.restarts + 1} of {RESTARTS})")
        self.ranks.broadcast(("revive", (dead,)))
        self.engines.revive(dead)
        self.engines.wait_ready()


def build_rows(run: Run, groups: list[Group]) -> tuple[list[Sample], list[float], Counter[str]]:
    """Training rows of the groups' rollouts, the advantage of each, and counts (turns, fork, cut, untrainable ...)."""
    records = [record for group in groups for record in group.kept]
    advantages = group_advantages([r["reward"] for r in records], [r["group"] for r in records], run.config.advantage)
    with ThreadPoolExecutor(8) as pool:
        logs = list(pool.map(lambda record: run.gateway.turns(record["id"]), records))
    rows: list[Sample] = []
    row_advantages: list[float] = []
    counts: Counter[str] = Counter()
    for record, advantage, log in zip(records, advantages.tolist(), logs):
        samples, reasons = assemble([Turn.from_record(turn) for turn in log], run.config.max_context_tokens)
        for sample in samples:
            sample.rollout = record["id"]
        rows += samples
        row_advantages += [advantage] * len(samples)
        counts.update(reasons | {"turns": len(log), "truncated": bool(record["truncated"])})
    return rows, row_advantages, counts


def fit(config: Config, train_tasks: list[dict], eval_tasks: list[dict], children: Children) -> None:
    """Trains `config.model` on `train_tasks`, evaluating on `eval_tasks`; a task is {"id", "agent", "verifier"}.

    Raises ValueError for settings that turn out wrong, ChildDied when a service ends by itself, RuntimeError with a
    named reason when nothing can be learned. `children` ends everything that was started.
    """
    if not train_tasks:
        raise ValueError("there are no training tasks")
    checkpoint = newest_checkpoint(config)
    scheduler = Scheduler(groups_per_step=config.groups_per_step, rollouts_per_group=config.rollouts_per_group,
                          groups_in_flight=config.groups_in_flight, max_staleness=config.max_staleness or None,
                          max_refills=config.max_refills, group_timeout=config.group_timeout,
                          evaluation_timeout=config.group_timeout)
    step = int(checkpoint.name.removeprefix("step-")) if checkpoint else 0  # one weight version a step
    with contextlib.ExitStack() as stack:
        log = Log(config, step)
        stack.callback(log.close)
        stack.push(lambda kind, *_: name_the_dead(children) if kind and issubclass(kind, Exception) else None)
        if config.resume:
            log.say(f"going on from {checkpoint or 'the beginning, step 0: there is no checkpoint yet'}")
        ranks = start_ranks(config, children)
        run = Run(config, train_tasks, eval_tasks, children, log, scheduler, ranks)
        # The engines take their part of the GPUs first, and leave it before the trainer comes.
        run.start_services()
        load_tokenizer(config)  # meanwhile
        children.wait_until(lambda: healthy(run.gateway.url), f"the gateway at {run.gateway.url}", 60)
        with run.gateway.hold():
            run.wait_for_engines()
            log.say(f"gateway {run.gateway.url}, engines {' '.join(run.engines.urls)}, "
                    f"files in {config.run_dir}")
            begun = time.monotonic()
            run.switch_to_trainer()
            policy = Policy(config, str(checkpoint or config.model), ranks)
            stack.callback(policy.writer.shutdown)  # however this ends: a checkpoint is written to its end
            record: dict[str, Any] | None = {"step": 0}  # of the last step, until it is evaluated and logged
            if checkpoint:
                state = policy.load(checkpoint)
                scheduler.load_state_dict(state["scheduler"])
                record, run.skipped = state["record"], run.groups_skipped()
                begun -= record["seconds_total"]  # so that this is of the run
            if log.last == step:
                record = None
            run.hand_over(policy, step)
        turn, awake = stack.enter_context(contextlib.ExitStack()), True  # the trainer's turn; whether engines are
        while True:
            # 1. Collect groups of finished rollouts; an evaluation of the present weights, if due, runs beside them.
            last, collecting = step >= config.steps, time.monotonic()
            if record is not None and eval_tasks and config.eval_every and run.engine_due(step):
                run.start_evaluation(step)
            groups, why = run.collect(step, training=not last)
            if record is not None:
                log.step(record | run.eval_metrics())
            if last:
                policy.finish_saving()
                ranks.close()
                break
            if why:
                log.say(why)

            # 2. The trainer's turn, which may last from the step before: calls are held, the engine sleeps.
            updating = time.monotonic()
            if awake:
                turn.enter_context(run.gateway.hold())
                pushed = run.switch_to_trainer()
                policy.to_device()
                switching = time.monotonic() - updating
            scheduler.update_started(groups, updating)

            # 3. Rows and advantages; one optimizer step for each mini-batch of whole groups.
            parts = [groups[i::config.minibatches] for i in range(config.minibatches)]
            batches = [build_rows(run, part) for part in parts if part]
            updates = policy.train([(rows, advantages) for rows, advantages, _ in batches if rows], step)
            memory = {"memory_update_gb": policy.peak_memory()}

            # 4. The engine's turn, unless another update can follow: new weights, then the held calls go on.
            step, pushing = step + 1, time.monotonic()
            scheduler.update_finished(pushing, step)
            if awake := run.engine_due(step) or not scheduler.ready_to_update(pushing)[0]:
                pushed |= run.hand_over(policy, step)
                turn.close()
                scheduler.engine_resumed(now := time.monotonic(), switching + now - pushing)
            resumed, memory["memory_push_gb"] = time.monotonic(), policy.peak_memory()

            # 5. Record what happened.
            rows, counts = [row for batch, _, _ in batches for row in batch], Counter()
            for _, _, reasons in batches:
                counts.update(reasons)
            record = {"step": step, **run.rollout_metrics(), "groups": len(groups), "rows": len(rows),
                      "trained_tokens": sum(row.trained_tokens for row in rows), **staleness(rows, step - 1),
                      **memory, **pushed, **counts, **(updates[0] if updates else {}), "seconds_total": resumed - begun,
                      "seconds_rollout": updating - collecting, "seconds_update": pushing - updating,
                      "seconds_push": resumed - pushing, "seconds_switch": scheduler.switch_seconds,
                      "groups_in_flight": scheduler.groups_in_flight, "time": time.time(),
                      "trained": {group.id: [record["index"] for record in group.kept] for group in groups}}
            run.gateway.call("POST", "/steps", record)
            if policy.written.done():
                policy.finish_saving()  # what went wrong is said now, not at the next one
            if step >= config.steps or config.checkpoint_every and step % config.checkpoint_every == 0:
                policy.save(config.run_dir / "checkpoints" / f"step-{step:06d}", config.keep_checkpoints,
                            {"scheduler": scheduler.state_dict(), "record": record})


def staleness(rows: list[Sample], version: int) -> dict[str, float]:
    """Of the trained tokens, against the weights that they train: mean, maximum, and the part of each staleness."""
    counts = Counter(version - sampled for row in rows for sampled in compress(row.versions, row.mask))
    total = max(counts.total(), 1)
    return {"staleness_mean": sum(age * n for age, n in counts.items()) / total, "staleness_max": max([0, *counts]),
            **{f"staleness_{age}": n / total for age, n in sorted(counts.items())}}


def name_the_dead(children: Children) -> None:
    """An error may only be what the death of a child looks like from here: raises ChildDied then."""
    time.sleep(0.5)
    children.check(but="engine")


def checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob("step-??????") if (path / "trainer.pt").exists())


def newest_checkpoint(config: Config) -> Path | None:
    """Where to go on with --resume, None: from the beginning; ValueError where the run's directory says otherwise."""
    used = (config.run_dir / "metrics.jsonl").exists()
    if used and not config.resume:
        raise ValueError(f"--name is {config.name!r}: {config.run_dir} holds a run already; choose another, "
                         "or go on with --resume")
    if config.resume and not used:
        raise ValueError(f"--resume: there is no run in {config.run_dir}")
    return max(checkpoints(config.run_dir / "checkpoints"), default=None)


if __name__ == "__main__":  # a rank after the first: started by rank 0, or by torchrun
    follow(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""The trainer: waits for groups of rollouts, makes one optimizer step of them, hands the weights to the engine.

    fit()   reads top to bottom:  collect -> pause and sleep the engine -> assemble rows -> advantages and weights
            -> update -> push the weights, wake, resume -> record (metrics, evaluation, checkpoint)
    Policy  the model: log-probs of the trained tokens of rows, optimizer step, weights for the engine, checkpoints
    Gateway the trainer's side of the gateway's HTTP interface

Who waits for whom: the trainer waits for finished rollouts (a long poll); while it updates, the gateway holds the
harnesses' calls, so that a harness sees one slow reply. Engine and trainer take turns on the same processors.

Left out so far: several ranks (FSDP2), packing without padding, offload. One process on a CPU or one GPU.
"""

import contextlib
import copy
import dataclasses
import json
import os
import random
import shutil
import threading
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.utils.checkpoint

from advantage import group_advantages, policy_loss, summarize, token_weights
from config import Config, make_key, read_secret
from scheduler import Group, Scheduler, task_order
from trajectory import Sample, Turn, assemble
from vllm_control import HERE, Children, Engine, free_port, healthy, start_engine

CHUNK_LOGITS = 2**26  # float32 logits of one chunk: 256 MB


class Gateway:
    """The gateway as the trainer sees it."""

    def __init__(self, url: str, admin_key: str) -> None:
        headers = {"Authorization": f"Bearer {admin_key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)
        self.version = 0  # of the weights that the engine has

    def call(self, method: str, path: str, body: dict | None = None, **params: Any) -> dict:
        """Repeats what a restarting gateway did not answer; every route is idempotent."""
        for attempt in range(20):
            try:
                reply = self.http.request(method, path, json=body, params=params)
                break
            except httpx.TransportError:
                if attempt == 19:
                    raise
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


class Policy:
    """The trained model with its optimizer, in float32 (GPU: bfloat16 compute by autocast)."""

    def __init__(self, config: Config, directory: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()
        if config.device == "auto":
            self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        else:
            self.device = torch.device(config.device)
        torch.set_num_threads(config.threads or os.cpu_count() or 1)
        torch.manual_seed(config.seed)
        self.config = config
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        if not self.tokenizer.chat_template:
            raise ValueError(f"--model {directory!r} has no chat template (tokenizer_config.json or "
                             "chat_template.jinja): use an instruct model, or put the template "
                             "of the format it was trained with there")
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(self.device)
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(self.model.config, name, None) not in (None, 1, 1.0):
                raise ValueError(f"--model {directory!r} sets {name}, which the trainer's log-probs do not apply")
        self.reference = copy.deepcopy(self.model).requires_grad_(False) if config.kl_coef else None
        if getattr(self.model.config, "attention_dropout", 0):
            self.model.eval()  # the sampler has no dropout either
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, weight_decay=config.weight_decay,
                                           betas=(config.adam_beta1, config.adam_beta2), fused=True)

    def logprobs(self, rows: list[Sample], model: torch.nn.Module | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs at the sampling temperature and entropies of the rows' trained tokens, row after row: [N], [N]."""
        model = model or self.model
        length = max(len(row.ids) for row in rows)
        ids = torch.tensor([row.ids + [0] * (length - len(row.ids)) for row in rows])  # (S, T)
        real = torch.tensor([[1] * len(row.ids) + [0] * (length - len(row.ids)) for row in rows])
        trained = torch.tensor([row.mask + [False] * (length - len(row.ids)) for row in rows])
        ids, real, trained = ids.to(self.device), real.to(self.device), trained.to(self.device)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = model.base_model(input_ids=ids, attention_mask=real, use_cache=False).last_hidden_state
            predicts = hidden[:, :-1][trained[:, 1:]]  # (N, D): the state before each trained token
            head = model.get_output_embeddings()
            return chunked_logprobs(predicts, ids[:, 1:][trained[:, 1:]], head, self.config.temperature)

    def micro_batches(self, rows: list[Sample]) -> list[list[int]]:
        """Indices of rows, longest first, in batches of at most `micro_batch_tokens` tokens with their padding."""
        batches: list[list[int]] = []
        for i in sorted(range(len(rows)), key=lambda i: -len(rows[i].ids)):
            if batches and len(rows[batches[-1][0]].ids) * (len(batches[-1]) + 1) <= self.config.micro_batch_tokens:
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    @torch.no_grad()
    def old_logprobs(self, rows: list[Sample]) -> list[torch.Tensor]:
        """Log-probs of each row's trained tokens under the present weights, [T_row] for each row."""
        old: dict[int, torch.Tensor] = {}
        for batch in self.micro_batches(rows):
            values = self.logprobs([rows[i] for i in batch])[0].split([rows[i].trained_tokens for i in batch])
            old.update(zip(batch, values))
        return [old[i] for i in range(len(rows))]

    def update(self, rows: list[Sample], advantages: list[float], version: int,
               old: list[torch.Tensor] | None = None) -> dict[str, float]:
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
        for batch in self.micro_batches(rows):
            part = [rows[i] for i in batch]
            row_of = torch.repeat_interleave(torch.tensor([row.trained_tokens for row in part])).to(on)  # [N]
            sampler = torch.tensor([x for row in part for x, m in zip(row.logprobs, row.mask) if m], device=on)
            logprobs, entropy = self.logprobs(part)
            loss, metrics = policy_loss(
                logprobs, logprobs.detach() if old is None else torch.cat([old[i] for i in batch]), sampler,
                torch.tensor([advantages[i] for i in batch], device=on)[row_of], weights[batch].to(on)[row_of],
                rows=row_of, ref_logprobs=self._reference_logprobs(part), ratio=c.ratio, clip_low=c.clip_low,
                clip_high=c.clip_high, dual_clip=c.dual_clip, importance=c.importance, importance_cap=c.importance_cap,
                kl_coef=c.kl_coef)
            loss.backward()
            # Trainer against sampler on unchanged weights: what is not 0 (ratio: 1) is a numerical or a plumbing error.
            same = torch.tensor([v == version for row in part for v, m in zip(row.versions, row.mask) if m], device=on)
            gap = (logprobs.detach() - sampler)[same]
            parts.append(metrics | {"loss": loss.detach(), "entropy_sum": entropy.sum(), "same_version": same.sum(),
                                    "ratio_sum": gap.exp().sum(),
                                    "logprob_gap_max": gap.abs().max() if len(gap) else same.sum()})
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), c.max_grad_norm)
        if not torch.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm.item()}: no update was made")
        self.optimizer.step()
        self.optimizer.zero_grad()
        result = summarize(parts) | {"grad_norm": norm.item()}
        result["ratio_mean"] *= result["tokens"] / max(result["same_version"], 1)
        return result

    def _reference_logprobs(self, rows: list[Sample]) -> torch.Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad():
            return self.logprobs(rows, self.reference)[0]

    def set_learning_rate(self, step: int) -> float:
        """Linear warm-up to `lr`, then constant or linear to a tenth at the last step. `step` counts from 1."""
        c = self.config
        rate = c.lr * min(1.0, step / max(c.lr_warmup_steps, 1))
        if c.lr_decay == "linear":
            rate *= 1 - 0.9 * max(0.0, step - c.lr_warmup_steps) / max(c.steps - c.lr_warmup_steps, 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def weights(self) -> dict[str, torch.Tensor]:
        """Tensors by their Hugging Face names for the engine; a tied output layer is the embedding, sent once."""
        tied = set(self.model.all_tied_weights_keys) if self.model.config.tie_word_embeddings else set()
        return {name: p.detach().contiguous() for name, p in self.model.state_dict().items() if name not in tied}

    def save(self, directory: Path, state: dict[str, Any]) -> None:
        """Hugging Face export, optimizer, RNG and `state`, written aside and renamed: a kill leaves the older one."""
        aside = directory.with_name(directory.name + ".writing")
        shutil.rmtree(aside, ignore_errors=True)
        self.model.save_pretrained(aside)
        self.tokenizer.save_pretrained(aside)
        rng = {"torch": torch.get_rng_state(), "python": random.getstate()}
        torch.save({"optimizer": self.optimizer.state_dict(), "rng": rng, **state}, aside / "trainer.pt")
        aside.rename(directory)

    def load(self, directory: Path) -> dict[str, Any]:
        """Optimizer and RNG of a checkpoint, whose weights the constructor loaded; returns the rest of its state."""
        state = torch.load(directory / "trainer.pt", map_location="cpu", weights_only=False)
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])
        return state


def chunked_logprobs(hidden: torch.Tensor, targets: torch.Tensor, head: torch.nn.Module,
                     temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets` [N] and entropies [N] from the states [N, D] before them, at `temperature`.

    In chunks of at most CHUNK_LOGITS logits, recomputed in the backward: the extra memory is one chunk's.
    """
    def chunk(hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(head(hidden).float() / temperature, dim=-1)  # (n, V)
        return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1).detach()

    size = max(1, CHUNK_LOGITS // head.weight.shape[0])
    if len(targets) <= size:
        return chunk(hidden, targets)
    parts = [torch.utils.checkpoint.checkpoint(chunk, h, t, use_reentrant=False)
             for h, t in zip(hidden.split(size), targets.split(size))]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


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
        path.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= step))
        self.file = path.open("a")
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
            self.wandb.log(record, step=record["step"])
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
                 scheduler: Scheduler) -> None:
        self.config, self.children, self.log, self.scheduler = config, children, log, scheduler
        self.train_tasks, self.eval_tasks = train_tasks, eval_tasks[:config.eval_tasks or None]
        self.began = int(time.time())  # in the ids of evaluation groups: a resumed run does not meet the old ones
        self.seq = 0  # of the last finished rollout that was read
        self.engine_restarts = 0
        self.records: list[dict] = []  # training rollouts that finished since the last step
        self.evaluated: list[dict] = []  # finished rollouts of the present evaluation
        self.seen_calls = False
        self.skipped = 0  # groups skipped up to the last step

    def start_services(self, model: str, device: str) -> None:
        """Engine, gateway, controller: those whose URLs are not given."""
        c, children = self.config, self.children
        secret_file = Path(c.secret_file or c.run_dir / "secret").absolute()
        key = make_key(read_secret(secret_file), "admin")
        engine_key_file = c.run_dir.absolute() / "engine.key"
        engine_url = c.engine_url or f"http://127.0.0.1:{c.engine_port or free_port()}"
        self.engine = Engine(engine_url, read_secret(engine_key_file), c.run_dir.absolute() / "weights")
        self.model, self.device = model, device
        if not c.engine_url:
            start_engine(children, c, model, engine_url, engine_key_file, self.device)
        gateway_url = c.gateway_url.rstrip("/") or f"http://127.0.0.1:{c.gateway_port or free_port()}"
        if not c.gateway_url:
            children.start("gateway", [
                str(HERE / "gateway.py"), "--run-dir", str(c.run_dir.absolute()), "--engine-url", engine_url,
                "--engine-key-file", str(engine_key_file), "--secret-file", str(secret_file), "--tokenizer", model,
                "--history", c.history, "--port", gateway_url.rsplit(":", 1)[1], "--die-with-parent"])
        children.wait_until(lambda: healthy(gateway_url), f"the gateway at {gateway_url}", 60)
        children.wait_until(self.engine.ready, f"the engine at {engine_url}", 600)
        self.gateway = Gateway(gateway_url, key)
        if c.start_controller:
            parts = [part for task in [*self.train_tasks, *self.eval_tasks] for part in
                     (task["agent"]["harness"], task["verifier"]["verify"]) if isinstance(part, str)]
            modules = ",".join(sorted({part.partition(":")[0] for part in parts}))
            children.start("controller", [
                str(HERE / "controller.py"), "--gateway-url", gateway_url, "--secret-file", str(secret_file),
                "--run-dir", str(c.run_dir.absolute()), "--max-running", str(c.max_running), "--preload", modules,
                "--die-with-parent"])

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
        page = self.gateway.call("GET", "/finished", after=self.seq, wait=1, limit=200)
        self.seq = page["seq"]
        for record in page["rollouts"]:
            outcome = self.scheduler.rollout_finished(record, time.monotonic())
            if outcome == "evaluation":
                self.evaluated.append(record)
            elif record["kind"] == "train" and outcome not in ("late", "duplicate"):
                self.records.append(record)
        self._check_calls(page["rollouts"])
        self.children.check(but="engine")
        if "engine" in self.children.children and self.children.children["engine"].process.poll() is not None:
            self.revive_engine()

    def collect(self, step: int, training: bool) -> tuple[list[Group], str]:
        """Polls until there are groups to train and no evaluation runs (`training` false: only the latter)."""
        while True:
            groups, why = self.scheduler.ready_to_update(time.monotonic())  # ends what is overdue, too
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
        skipped = sum(n for name, n in totals.items() if name.startswith("groups_skipped"))
        result = {"reward_mean": sum(rewards) / max(len(rewards), 1), "rollouts": len(self.records),
                  "failed": sum(record["status"] == "failed" for record in self.records),
                  "groups_skipped": skipped - self.skipped,
                  "engine_restarts": self.engine_restarts, **{f"total_{name}": n for name, n in sorted(totals.items())}}
        self.records, self.skipped = [], skipped
        return result

    def _check_calls(self, records: list[dict]) -> None:
        self.seen_calls = self.seen_calls or any(record["calls"] for record in records)
        if not self.seen_calls and len(self.records) >= self.config.rollouts_per_group:
            raise RuntimeError(
                f"no model calls seen: {len(self.records)} rollouts are over and none called the model. Does the "
                "harness take its URL from OPENAI_BASE_URL or ANTHROPIC_BASE_URL? The last one: "
                f"{self.records[-1]['status']}, {self.records[-1]['reason']}")

    def revive_engine(self) -> None:
        """Starts the engine again. It has the original weights then: calls are held until it has the current ones."""
        self.engine_restarts += 1
        if self.engine_restarts > 3:
            self.children.check()
        self.log.say(f"the engine ended; starting it again ({self.engine_restarts} of 3)")
        with self.gateway.hold():
            start_engine(self.children, self.config, self.model, self.engine.url,
                         self.config.run_dir.absolute() / "engine.key", self.device)
            self.children.wait_until(self.engine.ready, "the restarted engine", 600)
            self.engine.push_again(self.gateway.version)
            self.engine.resume()

    def switch_to_trainer(self) -> None:
        """Engine asleep, nothing in flight. To be called under `gateway.hold()`."""
        self.engine.pause()
        idle = lambda: self.gateway.call("GET", "/state")["in_flight"] == 0  # noqa: E731
        self.children.wait_until(idle, "the last generation", 60)
        self.engine.sleep()

    def push(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        """The weights into the engine, which wakes."""
        self.gateway.version = version
        try:
            self.engine.push(tensors, version)
            self.engine.resume()
        except httpx.TransportError:
            self.children.check(but="engine")
            self.revive_engine()


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
    policy = Policy(config, str(checkpoint or config.model))
    scheduler = Scheduler(groups_per_step=config.groups_per_step, rollouts_per_group=config.rollouts_per_group,
                          groups_in_flight=config.groups_in_flight, max_staleness=config.max_staleness,
                          max_refills=config.max_refills, group_timeout=config.group_timeout,
                          evaluation_timeout=config.group_timeout)
    if checkpoint:
        scheduler.load_state_dict(policy.load(checkpoint)["scheduler"])
    step = scheduler.version  # one weight version a step
    with contextlib.ExitStack() as stack:
        log = Log(config, step)
        stack.callback(log.close)
        run = Run(config, train_tasks, eval_tasks, children, log, scheduler)
        run.start_services(config.model, policy.device.type)
        log.say(f"gateway {run.gateway.http.base_url}, engine {run.engine.url}, files in {config.run_dir}")
        begun = time.monotonic()
        with run.gateway.hold():
            run.engine.pause()
            run.push(policy.weights(), step)
        record: dict[str, Any] | None = None if checkpoint else {"step": 0}  # of the last step, until evaluated
        while True:
            # 1. Collect groups of finished rollouts; an evaluation of the present weights, if due, runs beside them.
            last, collecting = step >= config.steps, time.monotonic()
            if record is not None and eval_tasks and config.eval_every and (step % config.eval_every == 0 or last):
                run.start_evaluation(step)
            groups, why = run.collect(step, training=not last)
            if record is not None:
                log.step(record | run.eval_metrics())
            if last:
                break
            if why:
                log.say(why)

            # 2. The trainer's turn: calls are held, the engine sleeps.
            updating, staleness = time.monotonic(), max(scheduler.staleness(group) for group in groups)
            with run.gateway.hold():
                run.switch_to_trainer()
                scheduler.update_started(groups, updating)

                # 3. Rows and advantages; one optimizer step for each mini-batch of whole groups.
                parts = [groups[i::config.minibatches] for i in range(config.minibatches)]
                batches = [build_rows(run, part) for part in parts if part]
                learning_rate = policy.set_learning_rate(step + 1)
                olds = [policy.old_logprobs(rows) if len(batches) > 1 and rows else None for rows, _, _ in batches]
                updates = [policy.update(rows, advantages, step, old)
                           for (rows, advantages, _), old in zip(batches, olds) if rows]

                # 4. The engine's turn: new weights, then the held calls go on.
                step, pushing = step + 1, time.monotonic()
                scheduler.update_finished(pushing, step)
                run.push(policy.weights(), step)
            resumed = time.monotonic()
            if step >= config.steps or config.checkpoint_every and step % config.checkpoint_every == 0:
                save_checkpoint(config, policy, step, {"scheduler": scheduler.state_dict()})

            # 5. Record what happened.
            rows, counts = [row for batch, _, _ in batches for row in batch], Counter()
            for _, _, reasons in batches:
                counts.update(reasons)
            record = {"step": step, **run.rollout_metrics(), "groups": len(groups), "rows": len(rows),
                      "trained_tokens": sum(row.trained_tokens for row in rows), "staleness_max": staleness,
                      "lr": learning_rate, **counts, **(updates[0] if updates else {}),
                      "seconds_rollout": updating - collecting, "seconds_update": pushing - updating,
                      "seconds_push": resumed - pushing, "seconds_total": resumed - begun}
            run.gateway.call("POST", "/steps", record)


def checkpoints(config: Config) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in config.run_dir.glob("checkpoints/step-??????") if (path / "trainer.pt").exists())


def newest_checkpoint(config: Config) -> Path | None:
    """Where to go on with --resume, None for a fresh run; ValueError where the run's directory says otherwise."""
    used = (config.run_dir / "metrics.jsonl").exists()
    if not config.resume:
        if used:
            raise ValueError(f"--name is {config.name!r}: {config.run_dir} holds a run already; choose another, "
                             "or go on with --resume")
        return None
    if not checkpoints(config):
        raise ValueError(f"--resume: there is no checkpoint in {config.run_dir / 'checkpoints'}")
    return checkpoints(config)[-1]


def save_checkpoint(config: Config, policy: Policy, step: int, state: dict[str, Any]) -> None:
    policy.save(config.run_dir / "checkpoints" / f"step-{step:06d}", state)
    for old in checkpoints(config)[:-config.keep_checkpoints]:
        shutil.rmtree(old)

"""Every setting of a run, in one flat dataclass; its command line (tyro) and its checks.

A recipe (`train_search.py`) subclasses `Config` with its own settings and changes defaults. The comment above each
field is its `--help`. Names say what is counted: `groups_per_step`, `rollouts_per_group`, never a bare batch size.

    class MyConfig(Config): my_knob: int = 3        config = parse(MyConfig)        # errors: one line, exit status 2
"""

import hashlib
import hmac
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar


@dataclass(kw_only=True)
class Config:
    """Train a language model with reinforcement learning inside the harness it will be deployed in."""

    # --- the run

    # Name of the run; its files are in RUNS_DIR/NAME. Empty: the recipe's name and the time.
    name: str = ""
    # Where runs are kept: metrics.jsonl, gateway log, checkpoints, output of rollouts.
    runs_dir: str = "runs"
    # Optimizer steps (one step trains GROUPS_PER_STEP groups) after which the run ends.
    steps: int = 40
    # Seeds the data order, the engine's sampling and everything else that is drawn.
    seed: int = 0
    # Go on with the run NAME from its newest checkpoint.
    resume: bool = False

    # --- the model

    # A local Hugging Face directory, or a hub name (Qwen3.5-9B means Qwen/Qwen3.5-9B). Empty: with a GPU
    # Qwen/Qwen3.5-9B, without one the built-in small model, made on first use in $HARNESSED_CACHE (default
    # ~/.cache/harnessed).
    model: str = ""
    # Jinja file that takes the place of the model's own chat template.
    chat_template: str = ""
    # Longest prompt plus response that the engine serves and the longest row that is trained, in tokens.
    max_context_tokens: int = 2048

    # --- rollouts

    # Groups (rollouts of one task) that one optimizer step consumes.
    groups_per_step: int = 16
    # Rollouts of one task; their mean reward is the baseline.
    rollouts_per_group: int = 8
    # Groups kept running at once. 0: GROUPS_PER_STEP, which is synchronous RL; more is collocated async. auto: as many
    # as keep GROUPS_PER_STEP * ROLLOUTS_PER_GROUP rollouts running, up to MAX_STALENESS / 2 * GROUPS_PER_STEP.
    groups_in_flight: int | Literal["auto"] = 0
    # Oldest token that is trained, in weight versions. 0: 2 * GROUPS_IN_FLIGHT / GROUPS_PER_STEP; for auto 8.
    max_staleness: int = 0
    # Groups started at most in one step in place of skipped ones (all rewards equal); then the step is smaller.
    max_refills: int = 16
    # Rollouts that the controller runs at once.
    max_running: int = 64
    # Attempts for a rollout that the machinery lost (a lost rollout is never reward 0).
    max_attempts: int = 3
    # Seconds for one rollout's harness and verifier each, held time excluded.
    rollout_timeout: float = 300.0
    # What a rollout counts whose harness or verifier failed or ran out of time: reward 0, or nothing.
    on_failure: Literal["zero", "drop"] = "zero"
    # Where sampled ids take the place of the rendered ones in later prompts of a rollout. exact: nowhere. tokens:
    # where both are the same text. messages: also where the harness sent our message back unchanged and the template
    # rewrote it.
    history: Literal["exact", "tokens", "messages"] = "tokens"

    # --- sampling

    # Sampling temperature of training rollouts; log-probs are taken at it on both sides.
    temperature: float = 1.0
    # Most tokens of one model call (clamped to the context left).
    max_response_tokens: int = 64
    # Evaluate after every so many steps, and at the start and the end. 0: never.
    eval_every: int = 10
    # Sampling temperature of evaluation rollouts.
    eval_temperature: float = 1.0
    # Rollouts of each evaluation task.
    eval_rollouts_per_task: int = 1
    # Evaluation tasks used, the first ones. 0: all.
    eval_tasks: int = 0

    # --- advantage and loss (advantage.py has the formulas)

    # How the rewards of a group become the advantages of its rollouts.
    advantage: Literal["grpo", "dr_grpo", "rloo", "maxrl"] = "grpo"
    # Weight of a token: 1/(R T_rollout), 1/T_update, or 1/(R LOSS_HORIZON).
    loss_normalization: Literal["rollout_mean", "token_mean", "constant"] = "rollout_mean"
    # Fixed length that the loss of a rollout is divided by with `constant` (Dr. GRPO).
    loss_horizon: float = 1000.0
    # Importance ratio of the clipped objective: of each token, or of the sequence (GSPO).
    ratio: Literal["token", "gspo"] = "token"
    # PPO clip below: ratios under 1 - CLIP_LOW get no gradient (when that would help the objective).
    clip_low: float = 0.2
    # PPO clip above: 1 + CLIP_HIGH (DAPO's clip-higher).
    clip_high: float = 0.28
    # With a negative advantage the ratio counts at most this much (dual-clip PPO).
    dual_clip: float = 3.0
    # Off-policy correction pi_old / pi_rollout: truncated for each token, for each row, masked out, or none.
    importance: Literal["token", "sequence", "mask", "none"] = "token"
    # Cap of the off-policy importance weight.
    importance_cap: float = 2.0
    # Weight of the KL penalty (k3 estimator) to the starting model. 0: no reference model is kept.
    kl_coef: float = 0.0
    # Optimizer steps that one batch of groups is cut into (whole groups each).
    minibatches: int = 1

    # --- optimizer

    # AdamW learning rate.
    lr: float = 1e-6
    # Steps over which the learning rate rises linearly from 0.
    lr_warmup_steps: int = 0
    # Learning rate after the warm-up: constant, or falling linearly to a tenth at the last step.
    lr_decay: Literal["constant", "linear"] = "constant"
    # AdamW weight decay.
    weight_decay: float = 0.0
    # AdamW decay of the mean of the gradients.
    adam_beta1: float = 0.9
    # AdamW decay of the mean of their squares.
    adam_beta2: float = 0.99
    # Gradients are clipped to this norm.
    max_grad_norm: float = 1.0
    # Tokens (padding included) of one forward and backward pass of a rank. Gradients do not depend on it. 0: 16384 on
    # a GPU, 1024 on a CPU, which has no use for more; a longer row is alone in its pass.
    micro_batch_tokens: int = 0
    # Compute activations again in the backward instead of keeping them. auto: on a GPU.
    activation_checkpointing: Literal["auto", "on", "off"] = "auto"

    # --- processes

    # Trainer processes that the model is sharded over (FSDP2). 0: one for each visible GPU; torchrun sets its own.
    ranks: int = 0
    # Where the trainer and the embedded engine compute.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # CPU threads of trainer and engine each (they take turns). 0: all cores; the engine one for a small model.
    threads: int = 0
    # A gateway that runs already. Empty: start one.
    gateway_url: str = ""
    # What serves the model. vllm: one vLLM server for each TENSOR_PARALLEL GPUs, on the trainer's own; embedded:
    # engine.py, which needs nothing else. auto: vllm where there is a GPU.
    engine: Literal["auto", "embedded", "vllm"] = "auto"
    # GPUs of one vLLM server.
    tensor_parallel: int = 1
    # More flags of `vllm serve`, as on a command line (with =: --vllm-args='--block-size 32'); they win over ours.
    vllm_args: str = ""
    # Interpreter that has vLLM. Empty: $HARNESSED_VLLM_PYTHON, else this one.
    vllm_python: str = ""
    # Engines that run already, separated by commas: `vllm_server.py` or `engine.py`. Empty: start them.
    engine_url: str = ""
    # File with the key that every route of the engines asks for. Empty: RUNS_DIR/NAME/engine.key, made if missing.
    engine_key_file: str = ""
    # Most that the engines' log-probs may be away from the trainer's (mean over a probe) after new weights were
    # pushed, else the run ends. 0: 1e-3 on a CPU (float32), 0.1 on a GPU (bfloat16).
    probe_tolerance: float = 0.0
    # File with the run's secret, from which all keys are made. Empty: RUNS_DIR/NAME/secret.
    secret_file: str = ""
    # Start a local controller. False: one runs elsewhere.
    start_controller: bool = True
    # Port of the gateway that is started. 0: a free one.
    gateway_port: int = 0

    # --- records

    # Checkpoint after every so many steps and at the end. 0: only at the end.
    checkpoint_every: int = 20
    # Checkpoints kept; older ones are removed.
    keep_checkpoints: int = 2
    # Weights & Biases: auto is online where WANDB_API_KEY is set, else offline.
    wandb: Literal["auto", "offline", "online", "disabled"] = "auto"
    # Project that the run is shown under.
    wandb_project: str = "harnessed"

    POSITIVE = "steps groups_per_step max_running max_attempts rollout_timeout max_response_tokens lr minibatches \
        max_grad_norm keep_checkpoints temperature loss_horizon eval_rollouts_per_task tensor_parallel"

    def __post_init__(self) -> None:
        recipe = Path(sys.argv[0]).stem or "run"
        self.name = self.name or f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.groups_in_flight = self.groups_in_flight or self.groups_per_step
        self.model = resolve_model(self.model)

    @property
    def run_dir(self) -> Path:
        return Path(self.runs_dir) / self.name

    @property
    def group_timeout(self) -> float:
        """Seconds after which a group ends with the rollouts it has: all attempts of all that queue before it."""
        auto, most = self.groups_in_flight == "auto", self.groups_per_step * (self.max_staleness or 8) / 2
        waves = 1 + (most if auto else self.groups_in_flight) * self.rollouts_per_group / self.max_running
        return 2 * self.rollout_timeout * self.max_attempts * waves

    def validate(self) -> None:
        """Raises ValueError naming the setting, its value and what would be right."""
        def need(ok: bool, setting: str, right: str) -> None:
            if not ok:
                flag = "--" + setting.replace("_", "-")
                raise ValueError(f"{flag} is {getattr(self, setting)!r}: {right}")

        for setting in self.POSITIVE.split():
            need(getattr(self, setting) > 0, setting, "must be greater than 0")
        for setting in "ranks max_staleness max_refills eval_every eval_tasks kl_coef lr_warmup_steps clip_low threads \
                micro_batch_tokens checkpoint_every weight_decay clip_high eval_temperature probe_tolerance".split():
            need(getattr(self, setting) >= 0, setting, "must not be negative")
        need(bool(re.fullmatch(r"[A-Za-z0-9_.-]{1,80}", self.name)) and self.name not in (".", ".."), "name",
             "use 1 to 80 letters, digits, '_', '.', '-'")
        need(self.rollouts_per_group >= 2, "rollouts_per_group", "must be at least 2: the others are the baseline")
        need(self.groups_in_flight == "auto" or self.groups_in_flight >= self.groups_per_step, "groups_in_flight",
             f"must be at least --groups-per-step ({self.groups_per_step}), or auto")
        need(self.groups_per_step % self.minibatches == 0, "minibatches",
             f"must divide --groups-per-step ({self.groups_per_step})")
        need(self.importance_cap >= 1, "importance_cap", "must be at least 1 (truncated importance weights use 2)")
        need(self.clip_low < 1, "clip_low", "must be under 1 (DAPO uses 0.2)")
        need(self.dual_clip > 1 + self.clip_high, "dual_clip", f"must be over 1 + --clip-high ({1 + self.clip_high})")
        need(self.max_response_tokens < self.max_context_tokens, "max_response_tokens",
             f"must be under --max-context-tokens ({self.max_context_tokens})")
        need(not 0 < self.micro_batch_tokens < self.max_context_tokens, "micro_batch_tokens",
             f"must hold the longest row, --max-context-tokens ({self.max_context_tokens}): a row is never split")
        need(0 <= self.adam_beta1 < 1, "adam_beta1", "must be in [0, 1)")
        need(0 <= self.adam_beta2 < 1, "adam_beta2", "must be in [0, 1)")
        address = r"https?://[^\s/,]+/?"
        need(bool(re.fullmatch(rf"({address})?", self.gateway_url)), "gateway_url", "use http://HOST:PORT")
        need(not self.engine_url or bool(re.fullmatch(rf"{address}(,{address})*", self.engine_url)), "engine_url",
             "use http://HOST:PORT, several separated by commas")
        need(self.engine != "embedded" or self.tensor_parallel == 1, "tensor_parallel",
             "the embedded engine has one GPU")
        need(0 <= self.gateway_port < 65536, "gateway_port", "must be a port number, or 0 for a free one")
        need(not self.chat_template or Path(self.chat_template).is_file(), "chat_template", "there is no such file")
        if self.model and Path(self.model).is_dir():
            need((Path(self.model) / "config.json").is_file(), "model", "there is no config.json in it")
        elif self.model:
            need("/" in self.model and not self.model.startswith((".", "/", "~")), "model",
                 "there is no such directory; give a directory with config.json, or a hub name such as Qwen3.5-9B")


def resolve_model(model: str) -> str:
    """`Qwen3.5-9B` -> `Qwen/Qwen3.5-9B`; an existing directory means itself."""
    if model and not Path(model).expanduser().is_dir() and re.fullmatch(r"Qwen[\w.-]+", model):
        return "Qwen/" + model
    return str(Path(model).expanduser()) if model.startswith("~") else model


def read_secret(path: Path) -> str:
    """The run's secret, from which all its keys are made. Made (mode 0600) if there is none."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            f.write(os.urandom(32).hex())
    return path.read_text().strip()


def make_key(secret: str, scope: str, rollout: str = "", attempt: int = 0) -> str:
    """The API key of (scope, rollout, attempt): who calls, with an HMAC. Scopes: admin, agent, verifier."""
    name = f"{scope}-{rollout}-{attempt}"
    return f"{name}-{hmac.new(secret.encode(), name.encode(), hashlib.sha256).hexdigest()[:32]}"


T = TypeVar("T", bound=Config)


def parse(config_class: type[T], args: list[str] | None = None) -> T:
    """The command line as a validated config. A bad setting ends the program with one line and exit status 2."""
    import tyro

    if int(os.environ.get("RANK", 0)) > 0:  # torchrun: only its rank 0 runs the recipe, the others follow it
        place = ["env://", os.environ["RANK"], os.environ["WORLD_SIZE"]]
        os.execv(sys.executable, [sys.executable, str(Path(__file__).with_name("trainer.py")), *place])
    config = tyro.cli(config_class, args=args, description=sys.modules[config_class.__module__].__doc__)
    try:
        config.validate()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    return config

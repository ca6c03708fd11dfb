"""Child processes of a run, and the engine among them: start, watch, sleep and wake it, push weights into it.

`Children` is the one place that starts processes (engine, gateway, controller, a recipe's own servers), waits until
they answer, notices when one dies, and ends them all. `Engine` speaks the routes of `vllm serve` in development mode,
which `engine.py` speaks too, so that nothing else in the code knows which of the two serves.

    push:   weights -> model.safetensors -> engine reads it in place -> version label

Left out so far: starting `vllm serve` itself, several engines, CUDA IPC (weights go through a file).
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from config import Config

HERE = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@dataclass
class Child:
    name: str
    argv: list[str]
    process: subprocess.Popen
    log: Path

    def last_words(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n  ".join(lines[-8:]) or "(it printed nothing)"


class ChildDied(RuntimeError):
    """A process of the run ended by itself; the message has its name, exit status and last output."""


class Children:
    """Processes that live as long as the `with` block, each in a session of its own, with its output in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.children: dict[str, Child] = {}

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    def start(self, name: str, argv: list[str], env: dict[str, str] | None = None) -> Child:
        """Starts `python argv`. PYTHONPATH leads to our modules and to the recipe's directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / f"{name}.log"
        path = os.pathsep.join(filter(None, [str(HERE), os.getcwd(), os.environ.get("PYTHONPATH", "")]))
        with log.open("ab") as output:
            process = subprocess.Popen([sys.executable, *argv], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                       start_new_session=True, env={**os.environ, "PYTHONPATH": path, **(env or {})})
        child = self.children[name] = Child(name, argv, process, log)
        return child

    def check(self, but: str = "") -> None:
        """Raises ChildDied if one has ended (`but`: the name of one that its caller looks after)."""
        for child in self.children.values():
            if child.name != but and child.process.poll() is not None:
                raise ChildDied(f"the {child.name} ended with status {child.process.returncode}; the end of its "
                                f"output ({child.log}):\n  {child.last_words()}")

    def wait_until(self, ready: Callable[[], bool], what: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise ChildDied(f"{what} did not answer within {timeout:.0f} s")
            time.sleep(0.05)

    def end(self) -> None:
        """SIGTERM to all, in the order opposite to their start; SIGKILL to the process groups of those that stay."""
        running = [c for c in reversed(self.children.values()) if c.process.poll() is None]
        for child in running:
            child.process.terminate()
            try:
                child.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                pass
        for child in running:
            try:
                os.killpg(child.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.process.wait()
        self.children.clear()


def healthy(url: str, headers: dict[str, str] | None = None) -> bool:
    try:
        return httpx.get(f"{url}/health", headers=headers, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


class Engine:
    """One inference engine by its URL. `key` opens every route; weights go to it through a file in `weights_dir`."""

    def __init__(self, url: str, key: str, weights_dir: Path) -> None:
        self.url, self.headers, self.weights_dir = url.rstrip("/"), {"Authorization": f"Bearer {key}"}, weights_dir
        self.http = httpx.Client(base_url=self.url, headers=self.headers, timeout=600, trust_env=False)

    def post(self, path: str, body: dict | None = None, **params: Any) -> dict:
        reply = self.http.post(path, json=body if body is not None else {}, params=params)
        if reply.status_code >= 400:
            raise RuntimeError(f"engine {self.url}{path} answered {reply.status_code}: {reply.text[:500]}")
        return reply.json() if reply.content[:1] in (b"{", b"[") else {}

    def ready(self) -> bool:
        return healthy(self.url, self.headers)

    def models(self) -> dict:
        reply = self.http.get("/v1/models")
        reply.raise_for_status()
        return reply.json()["data"][0]

    def pause(self) -> None:
        """Ends what is being generated: callers get the partial ids with finish reason "abort"."""
        self.post("/pause", mode="abort")

    def sleep(self) -> None:
        """Frees the memory of weights and KV cache (level 2); the engine must be paused."""
        self.post("/sleep", level=2)

    def push(self, tensors: dict[str, Any], version: int) -> float:
        """Wakes the weights, replaces them by `tensors` (Hugging Face names), labels them; returns seconds.

        The file stays, so that a restarted engine gets the same weights (`push_again`).
        """
        from safetensors.torch import save_file

        start = time.monotonic()
        self.weights_dir.mkdir(parents=True, exist_ok=True)
        new = self.weights_dir / "new.safetensors"
        save_file(tensors, new, metadata={"format": "pt"})
        new.rename(self.weights_dir / "model.safetensors")
        self.push_again(version)
        return time.monotonic() - start

    def push_again(self, version: int) -> None:
        self.post("/wake_up", tags="weights")
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self.weights_dir)}})
        self.post("/update_weight_version", {"new_version": str(version)})

    def resume(self) -> None:
        """Wakes the KV cache, empties the prefix cache (a weight update leaves stale entries), generates again."""
        self.post("/wake_up", tags="kv_cache")
        self.post("/reset_prefix_cache")
        self.post("/resume")

    def close(self) -> None:
        self.http.close()
        shutil.rmtree(self.weights_dir, ignore_errors=True)


def start_engine(children: Children, config: Config, model: str, url: str, key_file: Path, device: str) -> Child:
    """Starts the embedded engine on `url`'s port; it reads its key from `key_file`."""
    port = url.rsplit(":", 1)[1]
    argv = [str(HERE / "engine.py"), "--model", model, "--port", port, "--key-file", str(key_file), "--seed",
            str(config.seed), "--max-context", str(config.max_context_tokens), "--max-running", str(config.max_running),
            "--device", device, "--threads", str(config.threads), "--die-with-parent"]
    return children.start("engine", argv)

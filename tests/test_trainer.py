"""The trainer: its arithmetic against a plain version, and whole runs of the README's own example as real processes."""

import copy
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path

import matplotlib.image
import pytest
import torch
from transformers import AutoModelForCausalLM

import trainer
from bench.vllm_cpu import ROOT, make_tiny_model
from config import Config
from trainer import Policy, chunked_logprobs
from trajectory import Sample
from vllm_control import free_port

EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
SMALL = ("--steps 2 --groups-per-step 2 --rollouts-per-group 4 --eval-every 1 --max-response-tokens 16 --max-context-tokens 256 "
         "--micro-batch-tokens 512 --lr 1e-3 --threads 1 --checkpoint-every 1 --max-running 8").split()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(directory)
    return directory


def example(directory: Path, *arguments: str, source: str = EXAMPLE) -> subprocess.CompletedProcess:
    (directory / "train_mine.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_API_KEY": ""}
    return subprocess.run([sys.executable, "train_mine.py", *SMALL, *arguments], cwd=directory, env=environment, text=True,
                          capture_output=True, timeout=300)


def recipe(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "train_search.py", *arguments], cwd=ROOT, text=True, capture_output=True, timeout=120)


def rows_of(lengths: list[tuple[int, int]], seed: int = 0) -> list[Sample]:
    """Rows of (prompt, response) tokens; two rows make a rollout."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for i, (prompt, response) in enumerate(lengths):
        ids = torch.randint(10, 200, (prompt + response,), generator=draw).tolist()
        mask = [False] * prompt + [True] * response
        logprobs = [-float(torch.rand((), generator=draw)) if m else 0.0 for m in mask]
        rows.append(Sample(ids, mask, logprobs, [0 if m else -1 for m in mask], rollout=f"r{i // 2}"))
    return rows


ROWS = rows_of([(3, 5), (20, 1), (7, 9), (2, 30), (11, 4), (5, 5)])


def test_logprobs_of_padded_rows_equal_one_row_at_a_time(model: Path) -> None:
    config = Config(model=str(model), temperature=0.7)
    policy = Policy(config, str(model))
    got = policy.logprobs(ROWS)[0].split([row.trained_tokens for row in ROWS])
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row, logprobs in zip(ROWS, got, strict=True):
        logits = plain(torch.tensor([row.ids])).logits[0, :-1] / 0.7
        want = torch.log_softmax(logits, -1).gather(-1, torch.tensor(row.ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(logprobs, want[torch.tensor(row.mask[1:])], atol=1e-5, rtol=0)


@pytest.mark.parametrize("ratio,importance", [("token", "token"), ("gspo", "sequence")])
def test_an_update_does_not_depend_on_its_micro_batches(model: Path, ratio: str, importance: str) -> None:
    results = []
    for tokens in (32, 64, 0):
        config = Config(model=str(model), micro_batch_tokens=tokens, lr=1e-3, ratio=ratio, importance=importance)
        policy = Policy(config, str(model))
        metrics = policy.update(ROWS, [1.0, 1.0, -1.0, -1.0, 0.5, 0.5], version=0)
        results.append((metrics, copy.deepcopy(policy.model.state_dict())))
    (first, weights), others = results[0], results[1:]
    for metrics, other in others:
        for name in ("loss", "grad_norm", "tokens", "ratio_mean", "logprob_gap_max", "entropy_mean"):
            assert metrics[name] == pytest.approx(first[name], rel=1e-4), name
        for name, value in weights.items():
            torch.testing.assert_close(other[name], value, atol=1e-5, rtol=1e-4)


def test_chunked_logprobs_have_the_plain_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(trainer, "CHUNK_LOGITS", {"cpu": 640})
    head = torch.nn.Linear(8, 10, bias=False)  # 64 states a chunk
    hidden, targets, scale = torch.randn(150, 8), torch.randint(0, 10, (150,)), torch.randn(150)
    hidden = (hidden * torch.logspace(-2, 3, 150)[:, None]).requires_grad_()  # up to logits that overflow exp
    logprobs, entropy = chunked_logprobs(hidden, targets, head, 0.5)
    plain = torch.log_softmax(head(hidden) / 0.5, -1)
    wanted = plain.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=plain).entropy(), atol=1e-4, rtol=1e-4)
    assert not entropy.requires_grad
    for got, want in zip(*(torch.autograd.grad((values * scale).sum(), (hidden, head.weight)) for values in (logprobs, wanted))):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-4)


def test_log_probs_of_a_row_twice_as_long_take_at_most_a_chunk_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary, width, chunk = 4096, 16, 4 * 2**17  # bytes of a chunk of logits, 32 tokens each

    def peak(tokens: int, chunk: int) -> int:
        """Bytes allocated at most in forward and backward, by the allocator's own account: kernels' temporaries, too."""
        monkeypatch.setattr(trainer, "CHUNK_LOGITS", {"cpu": chunk // 4})
        head = torch.nn.Linear(width, vocabulary, bias=False)
        hidden, targets = torch.randn(tokens, width, requires_grad=True), torch.randint(0, vocabulary, (tokens,))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            chunked_logprobs(hidden, targets, head, 1.0)[0].sum().backward()
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))

    short, long, logits = peak(1024, chunk), peak(2048, chunk), 4 * 1024 * vocabulary
    assert chunk < short < 3 * chunk and long - short < chunk, (chunk, short, long)
    assert peak(2048, 2 * logits) - peak(1024, 2 * logits) > logits  # all in one chunk: the account sees it


def test_the_readme_example_trains_and_resumes(model: Path, tmp_path: Path) -> None:
    done = example(tmp_path, "--model", str(model), "--name", "one")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        for name in ("reward_mean", "eval_reward", "rollouts", "groups_skipped", "turns", "rows", "trained_tokens", "seconds_rollout",
                     "seconds_update", "staleness_max", "ratio_mean", "logprob_gap_max", "fork", "cut", "untrainable"):
            assert name in line, name
        assert line["logprob_gap_max"] < 1e-3 and abs(line["ratio_mean"] - 1) < 1e-3 and line["staleness_max"] == 0
    again = example(tmp_path, "--model", str(model), "--name", "one")
    assert again.returncode != 0 and "holds a run already" in again.stderr
    resumed = example(tmp_path, "--model", str(model), "--name", "one", "--resume", "--steps", "3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3] and lines[-1]["logprob_gap_max"] < 1e-3
    assert len(list((tmp_path / "runs/one/checkpoints").iterdir())) == 2
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).returncode == 1  # nothing is left running


def test_several_updates_in_one_turn_of_the_trainer(model: Path, tmp_path: Path) -> None:
    flags = ["--model", str(model), "--name", "one", "--groups-per-step", "1", "--groups-in-flight", "auto", "--max-staleness", "12",
             "--max-running", "24", "--eval-every", "7", "--checkpoint-every", "2"]
    for steps, more in ((9, []), (12, ["--resume"])):
        done = example(tmp_path, *flags, "--steps", str(steps), *more)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = [json.loads(line) for line in (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [*range(steps + 1)]
        pushed = [line["step"] for line in lines if "push_seconds" in line]
        assert {7, 9} <= {*pushed} and len(pushed) < steps, pushed  # evaluated weights, and the last ones, are in the engine
        assert {line["step"] for line in lines if "eval_reward" in line} >= {0, 7, steps}
        assert all(0 < line["seconds_switch"] < line["seconds_total"] and 1 <= line["groups_in_flight"] <= 6 for line in lines[1:])
        assert 0 < max(line["staleness_max"] for line in lines[1:]) <= 12 and all(line["trained_tokens"] for line in lines[1:])
        for line in lines[1:]:
            parts = {age: line[f"staleness_{age}"] for age in range(13) if f"staleness_{age}" in line}
            assert sum(parts.values()) == pytest.approx(1) and max(parts) == line["staleness_max"]
            assert sum(age * part for age, part in parts.items()) == pytest.approx(line["staleness_mean"])
            assert ("logprob_gap_max" in line) == (0 in parts) and line.get("logprob_gap_max", 0) < 1e-3
    command = [sys.executable, str(ROOT / "bench/timeline.py"), "runs/one", "--out", "run.png"]
    subprocess.run(command, cwd=tmp_path, check=True)
    picture = matplotlib.image.imread(tmp_path / "run.png")[..., :3].reshape(-1, 3)
    colours = [matplotlib.colormaps["tab10"].colors[version] for version in range(10)]  # of its calls; some are too short
    assert sum((abs(picture - colour).max(-1) < 0.01).any() for colour in colours) >= 4


def test_a_run_over_two_ranks_and_a_rank_that_dies(model: Path, tmp_path: Path) -> None:
    bare, template = tmp_path / "bare", model / "chat_template.jinja"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns(template.name))
    flags = ["--model", str(bare), "--name", "two", "--chat-template", str(template)]
    done = example(tmp_path, *flags, "--ranks", "2", "--minibatches", "2", "--kl-coef", "0.01")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/two/checkpoints/step-000002" / template.name).read_text() == template.read_text()
    lines = [json.loads(line) for line in (tmp_path / "runs/two/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert all(line["logprob_gap_max"] < 1e-3 and abs(line["ratio_mean"] - 1) < 1e-3 for line in lines[1:])
    assert all(line["memory_update_gb"] > 0 for line in lines[1:])
    resumed = example(tmp_path, *flags, "--resume", "--steps", "3")  # one rank
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    run = begin(model, tmp_path, "--steps", "1000", "--ranks", "2")
    rank = subprocess.run(["pgrep", "-P", str(run.pid), "-f", "trainer.py tcp"], capture_output=True, text=True).stdout.split()
    os.kill(int(rank[0]), signal.SIGKILL)
    output = run.communicate(timeout=60)[0]
    assert run.returncode == 1 and "rank1" in output and "status -9" in output, output
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).returncode == 1


def test_torchrun_starts_the_same_run(model: Path, tmp_path: Path) -> None:
    (tmp_path / "train_mine.py").write_text(EXAMPLE)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
                           "train_mine.py", *SMALL, "--model", str(model), "--name", "one", "--steps", "1"], cwd=tmp_path, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1] and lines[1]["logprob_gap_max"] < 1e-3


def test_two_nodes_have_their_own_engines(model: Path, tmp_path: Path) -> None:
    """Two launchers on one machine; the engine of the second is killed in mid-run."""
    (tmp_path / "train_mine.py").write_text(EXAMPLE)
    port, environment = str(free_port()), {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [subprocess.Popen([
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr",
        "127.0.0.1", "--master-port", port, "train_mine.py", *SMALL, "--model", str(model), "--name", "one", "--steps", "4"],
        cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for node in (0, 1)]
    metrics, deadline = tmp_path / "runs/one/metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert nodes[0].poll() is None and time.monotonic() < deadline, nodes[0].communicate()
        time.sleep(0.05)
    second = (tmp_path / "runs/one/rank1/engine.log").read_text().split("http://")[1].split()[0]
    assert f",http://{second} " in subprocess.run(["pgrep", "-af", f"gateway.py .*{tmp_path}"], capture_output=True, text=True).stdout
    subprocess.run(["pkill", "-9", "-f", f"engine.py --model {model} .*--port {second.rsplit(':')[1]} .*{tmp_path}"], check=True)
    outputs = [node.communicate(timeout=200)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4] and lines[-1]["engine_restarts"] == 1
    assert all(line["logprob_gap_max"] < 1e-3 for line in lines[1:])
    assert subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True).returncode == 1


def test_a_harness_that_never_calls_the_model_is_named(model: Path, tmp_path: Path) -> None:
    silent = EXAMPLE.replace("reply = OpenAI()", "return\n    reply = OpenAI()")
    done = example(tmp_path, "--model", str(model), source=silent)
    assert done.returncode == 1 and "no model calls seen" in done.stderr


def test_wrong_settings_end_with_one_clear_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"question": "Q", "answers": ["A"]}\n{"question": 3}\n')
    good = tmp_path / "good.jsonl"
    good.write_text('{"title": "T", "text": "x"}\n')
    files = ["--train-file", str(bad), "--eval-file", str(bad), "--corpus", str(good)]
    for arguments, message in [
        (["--model", "./nowhere"], "--model"), (["--rollouts-per-group", "1"], "--rollouts-per-group"),
        (["--clip-low", "1.5"], "--clip-low"), (["--no-such-flag"], "no-such-flag"), (["--train-file", "x"], "go together"),
        (["--engine-url", "localhost:1"], "--engine-url"), (files, "line 2"), (["--model", str(tmp_path)], "config.json"),
    ]:
        done = recipe(*arguments)
        assert done.returncode in (1, 2) and message in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr, (arguments, done.stderr)


def test_what_only_the_run_can_notice_ends_with_a_clear_message(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    (bare / "chat_template.jinja").unlink()
    done = recipe("--model", str(bare), "--runs-dir", str(tmp_path / "runs"), "--wandb", "disabled")
    assert done.returncode == 1 and "has no chat template" in done.stderr and "Traceback" not in done.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = recipe("--model", str(model), "--gateway-port", port, "--runs-dir", str(tmp_path / "runs"), "--wandb", "disabled")
    assert done.returncode == 1 and port in done.stderr and "Traceback" not in done.stderr, done.stderr
    failing = EXAMPLE.replace("import os", "raise RuntimeError('no luck')")
    done = example(tmp_path, "--model", str(model), "--max-refills", "0", source=failing)
    assert done.returncode == 1 and "no luck" in done.stderr, done.stderr


def begin(model: Path, directory: Path, *arguments: str) -> subprocess.Popen:
    """The README's example as a process; returns after its first step."""
    (directory / "train_mine.py").write_text(EXAMPLE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    run = subprocess.Popen([sys.executable, "train_mine.py", *SMALL, "--model", str(model), "--name", "one", *arguments],
                           cwd=directory, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # ignored in a shell's background
    metrics, deadline = directory / "runs/one/metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 2:  # steps 0 and 1
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return run


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_the_trainer_ends_nothing_is_left(model: Path, tmp_path: Path, how: signal.Signals) -> None:
    run = begin(model, tmp_path, "--steps", "1000")
    mine = ["pgrep", "-f", str(tmp_path)]
    assert len(subprocess.run(mine, capture_output=True, text=True).stdout.split()) >= 3  # engine, gateway, controller
    run.send_signal(how)
    run.communicate(timeout=30)
    deadline = time.monotonic() + 20
    while subprocess.run(mine, capture_output=True).returncode == 0:
        assert time.monotonic() < deadline, subprocess.run(["pgrep", "-af", str(tmp_path)], capture_output=True).stdout
        time.sleep(0.2)


def test_an_engine_killed_in_mid_run_is_started_again_with_the_current_weights(model: Path, tmp_path: Path) -> None:
    run = begin(model, tmp_path, "--steps", "5")
    subprocess.run(["pkill", "-9", "-f", f"engine.py --model {model} .*{tmp_path}"], check=True)
    output = run.communicate(timeout=200)[0]
    assert run.returncode == 0, output
    lines = [json.loads(line) for line in (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5] and lines[-1]["engine_restarts"] == 1
    assert all(line["logprob_gap_max"] < 1e-3 and line["staleness_max"] == 0 for line in lines[1:])  # never sampled with the original weights

"""Runs survive any crash: real runs, killed at seeded moments wherever it hurts, go on with --resume and lose nothing."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trainer
from bench.vllm_cpu import ROOT, make_tiny_model
from config import Config
from scheduler import Scheduler, task_order
from trainer import newest_checkpoint
from vllm_control import Children

RECIPE = '''
"""train_search.py with another harness and reward: two model calls with a search between them; every group has a signal."""
import os
import agents, train_search

def harness(task, workdir):
    from openai import OpenAI
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(2):
        reply = OpenAI().chat.completions.create(model=os.environ["MODEL_NAME"], messages=messages).choices[0].message
        found = agents.show_results(agents.run_search(task["search_url"], task["question"], 1))
        messages += [{"role": "assistant", "content": reply.content or ""}, {"role": "user", "content": found}]

def verify(task, workdir, turns):
    return int(workdir.parent.name.split(".")[-2]) % 2  # the rollout's index

def task(config, name, question, search_url):
    return {"id": name, "agent": {"harness": "mine:harness", "question": question["question"], "search_url": search_url},
            "verifier": {"verify": "mine:verify"}}

if __name__ == "__main__":
    train_search.task = task
    train_search.main()
'''
TASKS = 8
SETTINGS = ("--model tiny --train-file questions --eval-file questions --corpus corpus --name one --groups-per-step 2 "
            "--rollouts-per-group 4 --max-running 8 --max-response-tokens 16 --max-context-tokens 256 --micro-batch-tokens 512 "
            "--lr 1e-3 --threads 1 --eval-every 4 --eval-tasks 2 --eval-rollouts-per-task 2 --checkpoint-every 2").split()
KINDS = {"engine": "/engine.py", "gateway": "/gateway.py", "controller": "/controller.py", "rank1": "/trainer.py tcp"}


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the recipe, its data and a tiny model."""
    directory = tmp_path_factory.mktemp("start")
    make_tiny_model(directory / "tiny")
    words = ["red", "blue", "cat", "dog", "one", "two", "sun", "sea"][:TASKS]
    (directory / "mine.py").write_text(RECIPE)
    (directory / "questions").write_text("\n".join(json.dumps({"question": f"Say {word}!", "answers": [word]}) for word in words))
    (directory / "corpus").write_text(json.dumps({"title": "Words", "text": "Words are made of letters."}))
    return directory


class Run:
    """One process of a run in `directory`, with all that it starts."""

    def __init__(self, directory: Path, *arguments: str, output: str = "output") -> None:
        self.directory, self.files, self.log = directory, directory / "runs/one", directory / output
        found = sorted((self.files / "checkpoints").glob("step-??????"))
        self.came_from = f"runs/one/checkpoints/{found[-1].name}" if found else "the beginning, step 0"
        step = int(found[-1].name[5:]) if found else 0
        self.before = sum(line["step"] <= step for line in self.metrics())  # steps that are there to stay
        for left in (self.files / "checkpoints").glob("step-*.writing"):  # by a killed process, and not of this one
            left.rename(left.with_name("left.writing"))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
        with self.log.open("w") as file:
            self.process = subprocess.Popen([sys.executable, "mine.py", *SETTINGS, *arguments], cwd=directory, env=environment,
                                            stdout=file, stderr=file, start_new_session=True)

    def metrics(self) -> list[dict]:
        file = self.files / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []

    def output(self) -> str:
        return self.log.read_text()

    def processes(self) -> dict[int, str]:
        """All processes that work in the directory, and their command lines."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "cwd").startswith(str(self.directory)):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended
                pass
        return found

    def pid(self, who: str) -> int:
        return self.process.pid if who == "rank0" else next(pid for pid, line in self.processes().items() if KINDS[who] in line)

    def until(self, ready: Callable[[], object], seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.01)

    def until_steps(self, count: int) -> None:
        """Until this process has logged `count` steps."""
        self.until(lambda: "files in" in self.output() and len(self.metrics()) >= self.before + count)

    def stop_in_a_save(self) -> Path:
        """Stops rank 0 while it writes a checkpoint, which is returned by its final name."""
        directory = self.files / "checkpoints"
        while True:
            self.until(lambda: list(directory.glob("step-*.writing")))
            self.process.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            if writing := list(directory.glob("step-*.writing")):
                return writing[0].with_suffix("")
            self.process.send_signal(signal.SIGCONT)

    def ends(self, seconds: float = 90) -> int:
        """The exit status. Nothing of the run may stay: no process (and so no port, and no memory that it shared)."""
        status, deadline = self.process.wait(seconds), time.monotonic() + 10
        while self.processes():
            assert time.monotonic() < deadline, self.processes()
            time.sleep(0.05)
        return status

    def rollouts(self, kind: str) -> list[sqlite3.Row]:
        """The finished ones in the log of the gateway, which must have ended."""
        with contextlib.closing(sqlite3.connect(self.files / "gateway.sqlite")) as database:
            database.row_factory = sqlite3.Row
            return database.execute("SELECT * FROM rollouts WHERE seq NOT NULL AND kind = ? ORDER BY seq", (kind,)).fetchall()


def trained(metrics: list[dict]) -> dict[str, int]:
    """The step that trained each rollout, by its id."""
    steps = [(f"{group}.{index}", line["step"]) for line in metrics[1:] for group, many in line["trained"].items() for index in many]
    assert len(dict(steps)) == len(steps), "a rollout was trained twice"
    return dict(steps)


def place(group: str) -> int:
    """Of a group (`train.7`, or `train.7r1` where it had to be run again) in the data order."""
    return int(group.split(".")[1].split("r")[0])


def newest(run: Run) -> Path:
    return max((run.files / "checkpoints").glob("step-??????"), default=Path("step-000000"))


def beyond(run: Run) -> set[str]:
    """Finished rollouts that hold a token of a later version than the newest checkpoint's: of a branch that is left now."""
    return {row["id"] for row in run.rollouts("train") if (row["version_max"] or 0) > int(newest(run).name[5:])}


def check_books(run: Run, abandoned: set[str]) -> dict[str, int]:
    """No step is missing or there twice, and of every finished rollout it is known what became of it."""
    metrics, rollouts = run.metrics(), {row["id"]: row for row in run.rollouts("train")}
    assert [line["step"] for line in metrics] == list(range(len(metrics)))
    assert all(line.get("logprob_gap_max", 0) < 1e-3 for line in metrics[1:])
    used = trained(metrics)
    assert not used.keys() & abandoned
    for name, step in used.items():  # 4: the bound on staleness
        assert step - 1 - 4 <= rollouts[name]["version_min"] <= rollouts[name]["version_max"] <= step - 1
    assert newest(run).name == f"step-{metrics[-1]['step']:06d}" and not list(newest(run).parent.glob("*.writing"))
    state = torch.load(newest(run) / "trainer.pt", weights_only=False)["scheduler"]
    groups, counts = {rollouts[name]["group"] for name in used}, state["counts"]
    assert sorted(map(place, groups)) == sorted(state["consumed"]) and counts["groups_consumed"] == len(groups)

    held = {f"train.{k}" + (f"r{attempt}" if attempt else "") for k, attempt, _ in state["unfinished"]}
    fates: Counter[str] = Counter()
    for row in run.rollouts("eval"):
        fates["held" if row["seq"] > state["seen"] else "late or evaluation"] += 1
    for row in rollouts.values():
        fate = "held" if row["seq"] > state["seen"] or row["group"] in held or place(row["group"]) >= state["next_k"] else \
            "kept" if row["id"] in used else "abandoned" if row["id"] in state["abandoned"] else \
            "lost" if row["status"] == "lost" else "kept, in a group without a signal"
        assert fate != "kept, in a group without a signal" or row["group"] not in groups and counts["groups_rerun"]
        fates[fate] += 1
    print("what became of finished rollouts:", dict(fates), "and the counts:", counts)
    count = lambda *names: sum(counts.get(f"rollouts_{name}", 0) for name in names)  # noqa: E731
    assert count("kept") == sum(n for fate, n in fates.items() if fate.startswith("kept"))
    assert count("abandoned") == fates["abandoned"] and count("lost") == fates["lost"]
    assert count("late", "evaluation") == fates["late or evaluation"] and not count("dropped", "stale", "duplicate")
    return used


def test_a_run_that_everything_happens_to(start: Path, tmp_path: Path) -> None:
    """Each process of a run killed, and more, each time at a random moment; in between it goes on with --resume."""
    seed = int(os.environ.get("HARNESSED_SEED", "1"))
    draw, abandoned, resampled = random.Random(seed), set(), 0
    shutil.copytree(start, tmp_path, dirs_exist_ok=True)
    events = ["gateway", "controller", "rank1", "rank0 in a save", "SIGTERM in a save", "full disk"]
    draw.shuffle(events)
    for event in ["rank0 before the first checkpoint", *events, "engine"]:
        first, last = event.startswith("rank0 before"), event == "engine"
        ranks = "2" if event in ("rank1", "rank0 in a save", "SIGTERM in a save") else "1"
        steps = str(len(run.metrics()) + 4) if last else "1000"
        run = Run(tmp_path, "--ranks", ranks, "--steps", steps, "--groups-in-flight", "4",
                  *(["--checkpoint-every", "0"] if first else ["--resume"]))
        run.until_steps(1 + first)
        moment = draw.uniform(0, 2)
        print(f"seed {seed}: {event}, {moment:.2f} s after step {run.metrics()[-1]['step']}", flush=True)
        time.sleep(moment)
        happened = time.monotonic()
        if first:
            run.process.kill()
            assert run.ends() == -9 and newest(run).name == "step-000000"
            beginning = run.metrics()[1]["trained"]
        elif event in KINDS and not last:
            os.kill(run.pid(event), signal.SIGKILL)
            assert run.ends(30) == 1 and f"the {event} ended with status -9" in run.output(), run.output()
        elif event == "rank0 in a save":
            checkpoint = run.stop_in_a_save()
            run.process.kill()
            assert run.ends() == -9 and not checkpoint.exists() and list(checkpoint.parent.glob("*.writing"))
        elif event == "SIGTERM in a save":
            checkpoint = run.stop_in_a_save()
            run.process.send_signal(signal.SIGTERM)
            run.process.send_signal(signal.SIGCONT)
            assert run.ends(30) == 143 and newest(run) == checkpoint, run.output()  # written to its end
        elif event == "full disk":
            second = Run(tmp_path, "--resume", output="second")
            assert second.process.wait(60) == 1 and f"is going on, as process {run.process.pid}" in second.output(), second.output()
            resource.prlimit(run.process.pid, resource.RLIMIT_FSIZE, (3_500_000, resource.RLIM_INFINITY))
            assert run.ends() == 1 and "checkpoint could not be written" in run.output() and "disk full" in run.output()
        elif last:
            os.kill(run.pid("engine"), signal.SIGKILL)
            assert run.ends() == 0 and run.metrics()[-1]["engine_restarts"] == 1, run.output()
        print(f"  over after {time.monotonic() - happened:.1f} s; {newest(run).name}")
        assert first or f"going on from {run.came_from}" in run.output()
        resampled += 0 if first else run.metrics()[run.before]["same_version"]
        abandoned |= beyond(run)
    used = check_books(run, abandoned)
    assert resampled > 0  # tokens of the resumed weights, right after a resume: their log-probs are checked, too
    assert {f"{group}.{index}" for group, many in beginning.items() for index in many} <= used.keys()  # of version 0: kept


def test_a_resumed_run_trains_what_an_uninterrupted_one_trains(start: Path, tmp_path: Path) -> None:
    """Stopped at 4 of 8 steps, which are two epochs; and without the checkpoint of step 4, as if killed before it was
    written: its rollouts are in the gateway's log, and give the same step. Two ranks before, one after."""
    settings = "--eval-every 0 --checkpoint-every 1 --keep-checkpoints 9".split()
    shutil.copytree(start, tmp_path / "whole")
    whole = Run(tmp_path / "whole", "--ranks", "2", "--steps", "4", *settings)
    assert whole.ends() == 0, whole.output()
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/runs/one/checkpoints/step-000004")
    again = Run(tmp_path / "again", "--ranks", "1", "--steps", "8", "--resume", *settings)
    assert again.ends() == 0, again.output()
    check_books(again, set())
    ours, theirs = again.metrics()[4], whole.metrics()[4]
    assert ours["trained"] == theirs["trained"]
    for name in ("loss", "grad_norm", "entropy_mean", "reward_mean", "lr"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    ours, theirs, before = (load_file(run.files / f"checkpoints/step-{step:06d}/model.safetensors")
                            for run, step in ((again, 4), (whole, 4), (whole, 3)))
    for name, value in theirs.items():
        assert (ours[name] - value).norm() < 1e-5 * value.norm() and (before[name] - value).norm() > 1e-4 * value.norm(), name
    with contextlib.closing(sqlite3.connect(again.files / "gateway.sqlite")) as database:
        tasks = {name: json.loads(body)["task"]["id"] for name, body in database.execute("SELECT name, body FROM groups")}
    order = [tasks[f"train.{k}"] for k in range(2 * TASKS)]
    assert order == [f"train.{task_order(0, TASKS, k)}" for k in range(2 * TASKS)]
    assert len(set(order[:TASKS])) == len(set(order[TASKS:])) == TASKS
    assert [sorted(line["trained"]) for line in again.metrics()[1:]] == [sorted((f"train.{k}", f"train.{k + 1}")) for k in range(0, 16, 2)]


class Finished:
    """A gateway's log, page by page, and what else a poll asks for: nothing else happens."""

    def __init__(self, records: list[dict]) -> None:
        self.records = records

    def call(self, method: str, path: str, body: dict | None = None, after: int = 0, limit: int = 0, **_: object) -> dict:
        page = self.records[after:after + limit]
        return {"rollouts": page, "seq": after + len(page)}

    def nothing(self, *_: object, **__: object) -> None:
        pass

    check = look = dead = progress = nothing


def test_a_resumed_run_reads_the_whole_log_before_it_decides(tmp_path: Path) -> None:
    """Else it would be at version 5 when it comes to the tokens that the abandoned branch sampled as its version 5."""
    log = [{"id": f"train.{k}.{index}", "group": f"train.{k}", "index": index, "kind": "train", "status": "succeeded", "calls": 1,
            "reward": float(index), "version_min": version, "version_max": version}
           for k, version in [(8, 4), *((k, 0) for k in range(8)), *((k, 5) for k in range(9, 400))] for index in range(2)]
    finished = Finished([record | {"seq": seq} for seq, record in enumerate(log, 1)])
    scheduler = Scheduler(groups_per_step=1, rollouts_per_group=2, groups_in_flight=2)
    scheduler.load_state_dict({"version": 4, "next_k": 9, "consumed": list(range(8)), "unfinished": [[8, 0, 4]], "abandoned": [],
                               "counts": {"rollouts_kept": 16}, "seen": 18})
    tasks = [{"id": "t", "agent": {}, "verifier": {}}]
    run = trainer.Run(Config(name="one", runs_dir=str(tmp_path)), tasks, [], finished, finished, scheduler, finished)
    run.gateway = run.engines = finished
    groups, _ = run.collect(4, training=True)
    assert [group.k for group in groups] == [8] and run.seq == len(log) > 600
    assert len(scheduler.abandoned) == 2 * 391 and scheduler.counts["rollouts_kept"] == 18
    assert scheduler.to_start()[0].id == "train.9r1"  # of the two in flight, one is done and the other runs again


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    fresh, resumed = (Config(name="one", runs_dir=str(tmp_path), resume=resume) for resume in (False, True))
    assert newest_checkpoint(fresh) is None
    with pytest.raises(ValueError, match=f"there is no run in {tmp_path}/one"):
        newest_checkpoint(resumed)
    (tmp_path / "one").mkdir()
    (tmp_path / "one/metrics.jsonl").touch()  # killed before anything else
    assert newest_checkpoint(resumed) is None
    with pytest.raises(ValueError, match=f"{tmp_path}/one holds a run already"):
        newest_checkpoint(fresh)
    with Children(tmp_path / "one"), pytest.raises(ValueError, match=f"is going on, as process {os.getpid()}"):
        Children(tmp_path / "one").__enter__()
    with Children(tmp_path / "one"):  # free again
        pass

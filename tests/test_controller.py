"""The controller, with real processes: what becomes of each kind of harness and verifier, and what it leaves behind.

The functions harness_* and verify_* run inside rollouts. Most tests have a fake gateway, those at the end the real one.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import config  # noqa: E402

MARK = "HARNESSED_TEST_MARK"  # a word on the command line of all that a harness leaves behind
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)", MARK]

# ------------------------------------------------------------------------------------------- harnesses and verifiers


def harness_ok(task: dict, workdir: Path) -> None:
    (workdir / "result" / "answer").write_text(task["answer"])


def harness_raises(task: dict, workdir: Path) -> None:
    raise ValueError("no such luck")


def harness_exits(task: dict, workdir: Path) -> None:
    print("three it is")
    sys.exit(3)


def harness_segfaults(task: dict, workdir: Path) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def harness_garbage(task: dict, workdir: Path) -> None:
    for _ in range(10):
        os.write(1, os.urandom(1_000_000))
    print("\ud800 end")


def harness_closes_files(task: dict, workdir: Path) -> None:
    os.closerange(0, 1000)
    harness_ok(task, workdir)


def harness_daemon(task: dict, workdir: Path) -> None:
    """Leaves an orphan in a session of its own, which rewrites the result for ever; then ends or hangs."""
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.execv(sys.executable, [sys.executable, "-c", f"""
import time
while True:
    open({str(workdir / 'result' / 'answer')!r}, "w").write("cheat")
    time.sleep(0.001)""", MARK])
        os._exit(0)
    os.wait()
    while not (workdir / "result" / "answer").exists() or task.get("hang"):
        time.sleep(0.01)


def harness_sleeps(task: dict, workdir: Path) -> None:
    subprocess.Popen(SLEEPER, start_new_session=True)
    time.sleep(task.get("seconds", 600))


def harness_spies(task: dict, workdir: Path) -> None:
    """Writes down all it can see without reading memory."""
    seen = {"task": task, "cwd": os.getcwd(), "environ": dict(os.environ), "argv": sys.argv, "files": {}}
    for path in [Path("/proc/self/environ"), Path("/proc/self/cmdline"), *workdir.rglob("*")]:
        if path.is_file():
            seen["files"][str(path)] = path.read_text(errors="replace")
    for pid in (os.getpid(), os.getppid(), int(Path(f"/proc/{os.getppid()}/stat").read_text().split()[3])):
        seen["files"][f"{pid}"] = Path(f"/proc/{pid}/environ").read_text() + Path(f"/proc/{pid}/cmdline").read_text()
    (workdir / "result" / "seen").write_text(json.dumps(seen))


def verify_answer(task: dict, workdir: Path, turns: list[dict]) -> dict:
    answer = (workdir / "result" / "answer").read_text()
    return {"reward": float(answer == task["verifier"]["answer"]), "turns": len(turns)}


def verify_idle(task: dict, workdir: Path, turns: list[dict]) -> float:
    """1 if nothing of the harness runs any more."""
    time.sleep(0.05)
    (workdir / "result" / "answer").write_text("clean")
    time.sleep(0.1)
    return float((workdir / "result" / "answer").read_text() == "clean" and not marked())


def verify_seen(task: dict, workdir: Path, turns: list[dict]) -> float:
    seen = (workdir / "result" / "seen").read_text()
    return float("swordfish" not in seen and "verifier-" not in seen and "admin-" not in seen and "agent-" in seen
                 and json.loads(seen)["cwd"] == str(workdir.with_name("work")))


def verify_nan(task: dict, workdir: Path, turns: list[dict]) -> float:
    return float("nan")


def verify_none(task: dict, workdir: Path, turns: list[dict]) -> None:
    pass


def verify_raises(task: dict, workdir: Path, turns: list[dict]) -> float:
    raise KeyError("gold")


def verify_sleeps(task: dict, workdir: Path, turns: list[dict]) -> float:
    subprocess.Popen(SLEEPER, start_new_session=True)
    time.sleep(600)
    return 1.0


# -------------------------------------------------------------------------------------------------------- the fakes


class FakeGateway(ThreadingHTTPServer):
    """Enough of the gateway: `records` has what was claimed and reported; `held` grows by itself while `holding`."""

    daemon_threads, request_queue_size = True, 1024

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.queued, self.records, self.lock, self.held, self.holding = [], {}, threading.Lock(), 0.0, False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, path: str, body: dict) -> dict:
        _, kind, *rest = path.partition("?")[0].split("/")
        if kind == "claim":
            for _ in range(20):
                with self.lock:
                    taken, self.queued = self.queued[:body["max"]], self.queued[body["max"]:]
                    for claim in taken:
                        self.records[claim["id"]] = {"status": "running", "by": body["controller"], "claim": claim}
                if taken:
                    break
                time.sleep(0.02)
            return {"rollouts": taken, "held_seconds": self.held}
        if kind == "adopt":
            running = [r for r in self.records.values() if r["status"] == "running"]
            mine = [r["claim"] for r in running if r["by"] == body["controller"]]
            return {"rollouts": mine, "held_seconds": self.held}
        if kind == "state":
            self.held += 1.0 if self.holding else 0.0
            return {"held_seconds": self.held}
        if rest[1] == "turns":
            return {"turns": [], "next": None}
        self.records[rest[0]] |= {"report": body, "status": body["status"]} if rest[1] == "report" else {rest[1]: body}
        return {"status": body.get("status")}


class FakeHandler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = self.server.answer(self.path, json.loads(data or "{}"))
        reply = json.dumps(answer).encode()
        self.send_response(503 if answer is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        with contextlib.suppress(OSError):  # a controller may be gone
            self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        pass

    do_POST = do_GET


def marked() -> list[int]:
    """Processes that carry the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if MARK in path.read_text().split("\0"):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def until(true: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < end, "this never came true"
        time.sleep(0.01)
    return value


def environ() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


class Bench:
    """A gateway, and controllers that work for it."""

    def __init__(self, run_dir: Path, gateway: FakeGateway) -> None:
        self.gateway, self.run_dir, self.controllers, self.count = gateway, run_dir, [], 0
        self.secret = config.read_secret(run_dir / "secret")

    def start(self, *options: str, log: str = "log") -> subprocess.Popen:
        with (self.run_dir / log).open("ab") as file:
            self.controllers.append(subprocess.Popen(
                [sys.executable, str(ROOT / "controller.py"), "--run-dir", str(self.run_dir), "--gateway-url",
                 f"http://127.0.0.1:{self.gateway.server_port}", "--preload", "test_controller", *options],
                stdout=file, stderr=file,
                start_new_session=True, env=environ() | {"SECRET_OF_MINE": "swordfish"}))
        return self.controllers[-1]

    def add(self, harness: Any, verifier: Any = "verify_answer", timeout: float = 60.0, verifier_timeout: float = 60.0,
            **agent: Any) -> str:
        self.count += 1
        rollout = f"g.{self.count}"
        name = lambda f: f"test_controller:{f}" if isinstance(f, str) and ":" not in f else f  # noqa: E731
        task = {"id": "t", "agent": {"harness": name(harness), "answer": "42", **agent},
                "verifier": {"verify": name(verifier), "answer": "42", "timeout": verifier_timeout, "password": "swordfish"}}
        keys = {f"{scope}_key": config.make_key(self.secret, scope, rollout, 1) for scope in ("agent", "verifier")}
        self.gateway.queued.append({"id": rollout, "attempt": 1, "task": task, "timeout": timeout, **keys})
        return rollout

    def record(self, rollout: str) -> dict:
        return until(lambda: (r := self.gateway.records.get(rollout, {})).get("report") and r)

    def run(self, *task: Any, **options: Any) -> tuple[str, str, dict]:
        """-> (status, reason, record) of one rollout."""
        record = self.record(self.add(*task, **options))
        return record["report"]["status"], record["report"]["reason"], record

    def stop(self, number: int = signal.SIGTERM) -> None:
        for controller in self.controllers:
            if controller.poll() is None:
                controller.send_signal(number)
                assert controller.wait(20) == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("run"), FakeGateway())
    bench.start()
    yield bench
    bench.stop()
    assert not marked()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, FakeGateway())
    yield bench
    bench.stop()
    assert not marked()


# ------------------------------------------------------------------------------------------------------- verdicts


def test_success_posts_the_reward_and_cleans_up(shared: Bench) -> None:
    status, reason, record = shared.run("harness_ok")
    assert (status, reason, record["reward"]) == ("succeeded", "", {"reward": 1.0, "metrics": {"turns": 0.0}})
    assert record["agent_done"] == {"attempt": 1, "exit_status": 0, "reason": "", "output": ""}
    until(lambda: not (shared.run_dir / "rollouts" / f"{record['claim']['id']}.1").exists())


@pytest.mark.parametrize("harness, exit_status, reason", [
    ("harness_raises", 1, "harness exited 1: ValueError: no such luck"),
    ("harness_exits", 3, "harness exited 3: three it is"),
    ("harness_segfaults", -11, "harness exited -11: (no output)"),
    (["sh", "-c", "echo out; echo err >&2; exit 9"], 9, "harness exited 9: err"),
    (["no-such-program"], 1, "'no-such-program'"),
    ("no_such_module:run", 1, "ModuleNotFoundError: No module named 'no_such_module'"),
    ("test_controller:no_such_function", 1, "module 'test_controller' has no attribute 'no_such_function'"),
    (None, 1, "the harness None is neither a command that can be run nor a module:function that can be imported"),
    ([], 1, "the harness [] is neither a command that can be run nor a module:function that can be imported"),
])
def test_failing_harnesses(shared: Bench, harness: Any, exit_status: int, reason: str) -> None:
    status, said, record = shared.run(harness)
    assert status == "failed" and reason in said and "\n" not in said
    assert record["agent_done"]["exit_status"] == exit_status
    assert "reward" not in record


@pytest.mark.parametrize("verifier, reason", [
    ("verify_nan", "verifier exited 1: the verifier returned nan: the reward must be a finite number"),
    ("verify_none", "verifier exited 1: the verifier returned None: the reward must be a finite number"),
    ("verify_raises", "verifier exited 1: KeyError: 'gold'"),
    ("verify_sleeps", "verifier timed out after 2 s"),
    (["sh", "-c", "exit 4"], "verifier exited 4: (no output)"),
    ("no_such_module:verify", "verifier exited 1: the verifier 'no_such_module:verify'"),
])
def test_failing_verifiers(shared: Bench, verifier: Any, reason: str) -> None:
    limit = 2.0 if verifier == "verify_sleeps" else 60.0
    status, said, record = shared.run("harness_ok", verifier, verifier_timeout=limit)
    assert status == "failed" and said.startswith(reason) and "reward" not in record
    assert not marked()


def test_verifier_failed_by_the_machinery_is_lost(shared: Bench) -> None:
    assert shared.run("harness_ok", ["sh", "-c", "echo no gateway; exit 75"])[:2] == ("lost", "verifier: no gateway")


def test_of_garbage_output_the_gateway_gets_the_end(shared: Bench) -> None:
    status, _, record = shared.run("harness_garbage", "verify_nan")
    assert status == "failed" and record["agent_done"]["exit_status"] == 0
    assert record["agent_done"]["output"].endswith("end\n") and len(record["agent_done"]["output"]) <= 4096


def test_harness_that_closes_its_files(shared: Bench) -> None:
    assert shared.run("harness_closes_files")[0] == "succeeded"


def test_commands(shared: Bench) -> None:
    """A harness command finds its task in a file, a verifier command key and task on stdin, and posts the reward."""
    post = """read key; read task
case "$task" in *swordfish*) ;; *) exit 5;; esac
printf '{"reward": 0.5, "key": "%s"}' $key > body
exec python3 -c "
import os, urllib.request
url = os.environ['HARNESSED_GATEWAY'] + '/rollouts/' + os.environ['HARNESSED_ROLLOUT'] + '/reward'
urllib.request.urlopen(urllib.request.Request(url, open('body', 'rb').read()))" """
    look = """grep -q 42 "$HARNESSED_TASK" && ! grep -q sword"fish" "$HARNESSED_TASK" &&
! env | grep -q SECRET && test -d result && test -z "$(cat)" """
    status, reason, record = shared.run(["sh", "-c", look], ["sh", "-c", post])
    assert (status, reason) == ("succeeded", "")
    assert record["reward"] == {"reward": 0.5, "key": record["claim"]["verifier_key"]}


def test_harness_sees_no_key_but_its_own_and_no_verifier(shared: Bench) -> None:
    _, _, record = shared.run("harness_spies", "verify_seen")
    assert record["reward"]["reward"] == 1.0


# ---------------------------------------------------------------------------------------------------- process trees


def test_verifier_runs_after_the_last_straggler_is_dead(shared: Bench) -> None:
    assert shared.run("harness_daemon", "verify_idle")[2]["reward"]["reward"] == 1.0


@pytest.mark.parametrize("harness", ["harness_daemon", "harness_sleeps", SLEEPER])
def test_timeout_leaves_no_process(shared: Bench, harness: Any) -> None:
    status, reason, record = shared.run(harness, timeout=1.0, hang=True)
    assert (status, reason) == ("failed", "harness timed out after 1 s") and not marked()
    assert record["agent_done"]["exit_status"] is None


def test_held_time_does_not_count(shared: Bench) -> None:
    shared.gateway.holding, start = True, time.monotonic()  # each look at /state finds one more second held
    threading.Timer(3.0, setattr, (shared.gateway, "holding", False)).start()
    assert shared.run("harness_sleeps", timeout=0.5)[1] == "harness timed out after 0.5 s"
    assert 3.0 < time.monotonic() - start < 10


def test_64_at_once(shared: Bench) -> None:
    command = ["sh", "-c", "sleep 0.5; printf 42 > result/answer"]
    rollouts = [shared.add("harness_ok" if i % 2 else command) for i in range(128)]
    assert [shared.record(rollout)["reward"]["reward"] for rollout in rollouts] == [1.0] * 128


def test_concurrency_limit(bench: Bench) -> None:
    bench.start("--max-running", "3")
    rollouts = [bench.add("harness_sleeps", seconds=0.3) for _ in range(9)]
    seen = []
    while any("report" not in bench.gateway.records.get(r, {}) for r in rollouts):
        seen.append(len(marked()))
        time.sleep(0.02)
    assert 1 <= max(seen) <= 3


def test_two_controllers_share_the_queue(bench: Bench) -> None:
    rollouts = [bench.add("harness_ok") for _ in range(40)]
    for name in ("a", "b"):
        bench.start("--name", name, "--max-running", "2")
    assert {bench.record(r)["report"]["status"] for r in rollouts} == {"succeeded"}
    assert {bench.record(r)["by"] for r in rollouts} == {"a", "b"}


def test_a_name_runs_once(bench: Bench) -> None:
    bench.start()
    assert bench.run("harness_ok")[0] == "succeeded"  # it is up
    assert bench.start(log="second").wait(20) == 1
    assert "a controller 'local' already runs" in (bench.run_dir / "second").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_ends_and_reports_everything(bench: Bench, number: int) -> None:
    bench.start()
    rollouts = [bench.add("harness_sleeps") for _ in range(4)] + [bench.add("harness_ok", "verify_sleeps")]
    until(lambda: len(marked()) == 5)
    bench.stop(number)
    assert not marked()
    assert {bench.record(r)["report"]["reason"] for r in rollouts} == {
        "harness: the controller was stopped", "verifier: the controller was stopped"}


def test_killed_controller_leaves_nothing_and_its_successor_reports_lost(bench: Bench) -> None:
    first = bench.start()
    rollouts = [bench.add("harness_sleeps") for _ in range(4)] + [bench.add("harness_daemon", hang=True)]
    until(lambda: len(marked()) == 5)
    first.kill()
    first.wait()
    until(lambda: not marked(), 5)
    bench.start()
    assert {(r["status"], r["reason"]) for r in (bench.record(r)["report"] for r in rollouts)} == {
        ("lost", "the controller was restarted")}


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_keeper_loses_its_attempt(bench: Bench) -> None:
    controller = bench.start("--isolation", "none")  # bubblewrap itself, while it starts, may outlive its parent
    lost = bench.add(SLEEPER)
    until(marked)
    server, = children(controller.pid)
    os.kill(children(server)[0], signal.SIGKILL)
    report = bench.record(lost)["report"]
    assert report["status"] == "lost" and "the keeper of the harness died" in report["reason"]
    until(lambda: not marked(), 5)
    assert bench.run("harness_ok")[0] == "succeeded"


def test_a_killed_fork_server_stops_the_controller(bench: Bench) -> None:
    controller = bench.start()
    rollout = bench.add("harness_sleeps")
    until(marked)
    os.kill(children(controller.pid)[0], signal.SIGKILL)
    assert controller.wait(20) == 1 and not marked()
    assert bench.record(rollout)["report"]["status"] == "lost"
    assert "the controller's fork server ended with status -9" in (bench.run_dir / "log").read_text()


def test_a_preload_that_fails_or_hangs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ends the controller with the reason; the second is named in the log, and dies with the controller."""
    assert bench.start("--preload", "no_such_module", log="first").wait(20) == 1
    log = (bench.run_dir / "first").read_text()
    assert "ModuleNotFoundError: No module named 'no_such_module'" in log and log.endswith("with status 1; see above\n")
    (bench.run_dir / "hanging.py").write_text("import time; time.sleep(600)")
    monkeypatch.syspath_prepend(bench.run_dir)
    controller = bench.start("--preload", "hanging")
    until(lambda: "importing hanging" in (bench.run_dir / "log").read_text())
    server, = children(controller.pid)
    controller.terminate()
    controller.wait()
    until(lambda: not Path(f"/proc/{server}").exists(), 5)


def test_dies_with_its_parent(bench: Bench) -> None:
    script = """import sys, time
from pathlib import Path
from vllm_control import Children
with Children(Path(sys.argv[1])) as children:
    print(children.start("controller", sys.argv[2:]).process.pid, flush=True)
    time.sleep(600)"""
    parent = subprocess.Popen([
        sys.executable, "-c", script, str(bench.run_dir / "children"), str(ROOT / "controller.py"), "--run-dir",
        str(bench.run_dir), "--gateway-url", f"http://127.0.0.1:{bench.gateway.server_port}"],
        stdout=subprocess.PIPE, text=True, env=environ())
    controller = int(parent.stdout.readline())
    rollout = bench.add("harness_sleeps")
    until(marked, 120)
    parent.kill()
    parent.wait()
    assert bench.record(rollout)["report"]["status"] == "lost"
    until(lambda: not Path(f"/proc/{controller}").exists())


def test_a_full_disk_loses_the_attempt(bench: Bench) -> None:
    bench.start()
    until(lambda: "rollouts at once" in (bench.run_dir / "log").read_text())
    (bench.run_dir / "rollouts").rmdir()
    (bench.run_dir / "rollouts").symlink_to("/dev/full")  # nothing can be made there
    status, said, _ = bench.run("harness_ok")
    assert status == "lost" and "Error" in said


def test_wrong_settings(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, str(ROOT / "controller.py"), "--run-dir", str(tmp_path), "--gateway-url",
                          "http://127.0.0.1:9", "--max-running", "0"], capture_output=True, text=True, timeout=30)
    assert run.returncode == 1 and run.stderr == "--max-running is 0: must be greater than 0\n"


# ------------------------------------------------------------------------------------------- with the real gateway


class StubEngine(ThreadingHTTPServer):
    """Speaks vLLM's routes: renders three ids, samples two of version 7, says "42"; it answers 503 while `broken`."""

    daemon_threads, request_queue_size, broken = True, 1024, False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, path: str, body: dict) -> dict | None:
        choice = {"index": 0, "finish_reason": "stop"}
        return None if self.broken else {
            "/v1/models": {"data": [{"id": "stub", "max_model_len": 64}]},
            "/v1/chat/completions/render": {"token_ids": [1, 2, 3], "sampling_params": {}},
            "/inference/v1/generate": {"request_id": "r", "choices": [{
                **choice, "token_ids": [4, 5], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]},
                "weight_versions": [{"version": "7", "start": 0, "end": 2}]}]},
            "/v1/chat/completions/derender": {"choices": [{**choice, "message": {"content": "42"}}]},
        }.get(path, {})


class RealBench(Bench):
    """The real gateway, on the stub engine."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.controllers, self.engine = run_dir, [], StubEngine()
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.gateway = types.SimpleNamespace(server_port=s.getsockname()[1])
        self.key = config.make_key(config.read_secret(run_dir / "secret"), "admin")
        self.start_gateway()

    def start_gateway(self) -> None:
        with (self.run_dir / "gateway.log").open("ab") as file:
            self.process = subprocess.Popen([
                sys.executable, str(ROOT / "gateway.py"), "--run-dir", str(self.run_dir), "--engine-retry", "1",
                "--port", str(self.gateway.server_port), "--engine-url", f"http://127.0.0.1:{self.engine.server_port}"],
                stdout=file, stderr=file)
        until(lambda: self.ask("/health"))

    def ask(self, path: str, body: dict | None = None) -> dict | None:
        url, headers = f"http://127.0.0.1:{self.gateway.server_port}{path}", {"Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(url, body and json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return json.loads(reply.read())
        except urllib.error.URLError as error:
            assert path == "/health", (path, getattr(error, "read", lambda: error)())

    def create(self, group: str, harness: Any, verifier: Any, n: int = 1, **agent: Any) -> None:
        self.ask("/rollouts", {"group": group, "n": n, "timeout": 60.0, "max_attempts": 2, "task": {
            "id": "t", "agent": {"harness": harness, **agent}, "verifier": {"verify": verifier, "answer": "42"}}})

    def finished(self, n: int) -> list[dict]:
        return until(lambda: len(r := self.ask("/finished?after=0")["rollouts"]) >= n and r, 60)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealBench]:
    bench = RealBench(tmp_path)
    bench.start()
    until(lambda: "rollouts at once" in (bench.run_dir / "log").read_text())
    yield bench
    bench.stop()
    bench.process.terminate()
    bench.process.wait(20)
    assert not marked()


def harness_asks(task: dict, workdir: Path) -> None:
    from openai import OpenAI

    client = OpenAI(max_retries=0)
    for _ in range(task.get("calls", 1)):
        reply = client.chat.completions.create(model=os.environ["MODEL_NAME"], max_tokens=8, messages=[
            {"role": "user", "content": "6 x 7?"}])
    (workdir / "result" / "answer").write_text(reply.choices[0].message.content)


def verify_turns(task: dict, workdir: Path, turns: list[dict]) -> dict:
    good = all((t["prompt_ids"], t["response_ids"], t["versions"]) == ([1, 2, 3], [4, 5], [7, 7]) for t in turns)
    answer = (workdir / "result" / "answer").read_text()
    return {"reward": float(good and answer == task["verifier"]["answer"]), "turns_seen": len(turns)}


def test_end_to_end(real: RealBench) -> None:
    real.create("many", "test_controller:harness_asks", "test_controller:verify_turns", n=32)
    records = real.finished(32)
    assert {(r["status"], r["reward"], r["calls"], r["attempts"]) for r in records} == {("succeeded", 1.0, 1, 1)}
    assert all(r["metrics"] == {"turns_seen": 1.0} for r in records)


def test_all_pages_of_turns_reach_the_verifier(real: RealBench) -> None:
    real.create("long", "test_controller:harness_asks", "test_controller:verify_turns", calls=205)
    record, = real.finished(1)
    assert (record["status"], record["reward"], record["metrics"]) == ("succeeded", 1.0, {"turns_seen": 205.0})


def test_outcomes_at_the_gateway(real: RealBench) -> None:
    """No model call and no reward; a task without harness; an engine that is down (lost, twice, never reward 0)."""
    real.create("mute", ["true"], ["true"])
    real.ask("/rollouts", {"group": "empty", "n": 1, "max_attempts": 2, "task": {"id": "t"}})
    real.engine.broken = True
    real.create("down", "test_controller:harness_asks", "test_controller:verify_turns")
    records = {r["group"]: r for r in real.finished(3)}
    assert records["mute"]["reason"] == "verifier posted no reward" and records["mute"]["calls"] == 0
    assert "the harness None is neither" in records["empty"]["reason"] and records["empty"]["status"] == "failed"
    assert (records["down"]["status"], records["down"]["attempts"], records["down"]["reward"]) == ("lost", 2, None)


def test_a_killed_gateway_loses_nothing(real: RealBench) -> None:
    """What runs while it is away is reported once it is back; a claim that broke off is asked about."""
    real.create("g", "test_controller:harness_sleeps", ["true"], n=3, seconds=2.0)
    until(lambda: len(marked()) == 3)
    real.process.kill()
    real.process.wait()
    until(lambda: not marked())
    time.sleep(0.5)
    real.start_gateway()
    assert [(r["status"], r["attempts"], r["exit_status"]) for r in real.finished(3)] == [("failed", 1, 0)] * 3
    real.create("h", "test_controller:harness_asks", "test_controller:verify_turns", n=4)
    assert [r["reward"] for r in real.finished(7)[3:]] == [1.0] * 4


def test_a_wrong_secret_or_gateway_is_said(real: RealBench, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config.read_secret(other / "secret")
    run = subprocess.run([sys.executable, str(ROOT / "controller.py"), "--run-dir", str(other), "--gateway-url",
                          f"http://127.0.0.1:{real.gateway.server_port}"], capture_output=True, text=True, timeout=30)
    assert run.returncode == 1 and "is it the gateway, and" in run.stderr.splitlines()[-1]

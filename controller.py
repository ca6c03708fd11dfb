"""Runs rollouts as local processes: claims queued ones at the gateway, launches, watches, reports. Linux only.

    controller (asyncio, a task for each attempt) ──claim, agent_done, report──> gateway
      └─ fork server: single-threaded, has imported the openai client and the harness modules
           └─ keeper: one for each phase (harness, then verifier), on a socket to the controller
                └─ the harness or verifier, in a session, directory and environment of its own

A keeper adopts what its phase leaves behind (subreaper) and kills it all when the phase ends or the socket closes: a
time-out, Ctrl-C or SIGKILL of the controller leaves no process, and nothing of the harness runs during grading.
RUN_DIR/rollouts has ID.ATTEMPT/ (the working directory, with result/) and ID.ATTEMPT.{harness,verifier}.txt (the last
megabyte of output); they are removed when a rollout has succeeded.

A harness gets base_env(), HOME and TMPDIR in its directory, MODEL_NAME, {OPENAI,ANTHROPIC}_{BASE_URL,API_KEY}, and
HARNESSED_TASK: a file with its part of the task as JSON. A verifier command gets HARNESSED_GATEWAY, HARNESSED_ROLLOUT,
on stdin a line with its key and a line with the whole task, and posts the reward itself. A verifier that exits with 75
was failed by the machinery: its attempt is lost, not failed.

Left out, so far: Kubernetes, bubblewrap (harnesses are trusted code). Run: python controller.py --help
"""

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import config

PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "USER", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
OUTPUT_BYTES, TAIL_BYTES = 1_000_000, 4_096  # of a phase's output: kept in its file, sent to the gateway
CLAIM_SECONDS = 1  # how long a claim waits at the gateway for work, and so how long a controller may take to stop
KILL_SECONDS = 30  # for processes to die of SIGKILL
TEMPORARY_FAILURE = 75  # EX_TEMPFAIL of sysexits.h
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def base_env() -> dict[str, str]:
    """All that a rollout sees of our environment, and settings for programs that share the machine with many others."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return passed | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None).prctl(option, value, 0, 0, 0):
        raise OSError(f"prctl({option}, {value}) failed")


def say(text: str) -> None:
    print(f"controller: {text}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------- the fork server, and what comes from its forks


def warm_up() -> None:
    """Makes a client and a call to a closed port: what they import and cache is then there before the fork."""
    import httpcore2
    import openai

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        with client, contextlib.suppress(openai.APIConnectionError):
            client.chat.completions.create(model="none", messages=[{"role": "user", "content": ""}], tools=[])
    # Each client loads the CA bundle, 20 ms of CPU, needed or not. The first one in each fork finds it loaded.
    make, spare = httpcore2.default_ssl_context, [httpcore2.default_ssl_context()]
    httpcore2.default_ssl_context = lambda **options: spare.pop() if spare else make(**options)


def bring(module: str) -> None:
    """Imports a module once for all later forks."""
    say(f"importing {module}")  # the last word, if that never returns
    try:
        importlib.import_module(module)
    except BaseException as error:  # each rollout that names it will fail with the reason
        say(f"cannot import {module}: {type(error).__name__}: {error}")
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        say(f"{threads} threads after importing {module}: a fork has only one")


def fork_server(control: socket.socket, modules: list[str]) -> None:
    """Forks a keeper for each socket that `control` brings (with the name of a module to import), until it closes."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # keepers look after themselves; but an import that hangs must end too
    warm_up()
    for module in modules:
        bring(module)
    gc.disable()
    control.send(b"ready")
    control.settimeout(1.0)
    keepers: set[int] = set()
    while True:
        while keepers and (pid := os.waitpid(-1, os.WNOHANG)[0]):
            keepers.discard(pid)
        end_children(keepers)  # what a killed keeper left has come to us
        try:
            message, fds, *_ = socket.recv_fds(control, 4096, 1)
        except TimeoutError:
            continue
        if not message:
            return
        if not fds:
            continue  # no room for another file: its sender sees the other end closed
        if (module := message.decode()) not in modules:
            modules.append(module)
            bring(module)
        gc.freeze()  # a collection in a fork would touch, and so copy, every page
        with socket.socket(fileno=fds[0]) as link:
            try:
                if not (pid := os.fork()):
                    control.close()
                    keep(link)
                keepers.add(pid)
            except OSError as error:
                link.sendall(json.dumps({"problem": f"cannot fork: {error}"}).encode() + b"\n")


def end_children(spared: set[int] = frozenset()) -> bool:
    """Kills our children until there are none: when one dies, its own come to us."""
    deadline = time.monotonic() + KILL_SECONDS
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not (pids := set(map(int, children)) - spared) or time.monotonic() > deadline:
            return not pids
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.001)


def keep(link: socket.socket) -> None:
    """A keeper's life: a job comes by `link`, and how it ended goes back, or a problem, which is ours."""
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        job = json.loads(link.makefile("rb").readline())
        try:
            ended = watch(job, *launch(job, link), link)
        except OSError as error:
            end_children()
            ended = {"problem": f"{type(error).__name__}: {error}"}
        link.sendall(json.dumps(ended).encode() + b"\n")
    finally:  # also without a controller
        os._exit(0)


def launch(job: dict, link: socket.socket) -> tuple[int, int]:
    """Forks the process of a phase. -> (its pid, where to read what it prints)"""
    workdir = Path(job["workdir"])
    if job["role"] == "harness":
        shutil.rmtree(workdir, ignore_errors=True)
        for part in ("result", "tmp"):
            (workdir / part).mkdir(parents=True)
        (workdir / "task.json").write_text(json.dumps(job["task"]))
    os.chdir(workdir)
    os.environ.clear()
    os.environ.update(job["env"])
    stdin, (output, write) = os.memfd_create("stdin"), os.pipe()
    if isinstance(job["target"], list):  # only for a command: what a Python verifier runs would inherit its key
        os.pwrite(stdin, job["stdin"].encode(), 0)
    if pid := os.fork():
        os.close(write)
        return pid, output
    status = 1
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for fd, standard in ((stdin, 0), (write, 1), (write, 2)):
            os.dup2(fd, standard)
        for fd in (stdin, write, output, link.detach()):
            os.close(fd)
        gc.enable()
        perform(job)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(bool(error.code))
        if isinstance(error.code, str):
            os.write(2, error.code.encode(errors="replace") + b"\n")
    except BaseException:  # the boundary of one rollout: what it raises is its outcome
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(status & 255)


def watch(job: dict, pid: int, source: int, link: socket.socket) -> dict:
    """Until the process ends or `link` closes; then ends what it left. -> how it ended (status 128 + n: by signal n)"""
    output, status, pidfd = b"", None, os.pidfd_open(pid)
    waiting = [pidfd, link, source]
    while not {pidfd, link} & (ready := set(select.select(waiting, [], [])[0])):
        output = (output + (chunk := os.read(source, 65536)))[-OUTPUT_BYTES:]
        if not chunk:
            waiting.remove(source)  # it closed its output, and goes on
    if pidfd in ready:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        status = status if status >= 0 else 128 - status
    problem = "" if end_children() else f"a process outlived SIGKILL by {KILL_SECONDS} s"
    os.set_blocking(source, False)
    with contextlib.suppress(BlockingIOError):
        output = (output + os.read(source, OUTPUT_BYTES))[-OUTPUT_BYTES:]  # more than a pipe holds
    Path(f"{job['workdir']}.{job['role']}.txt").write_bytes(output)
    return {"status": status, "problem": problem, "output": output[-TAIL_BYTES:].decode(errors="replace")}


def perform(job: dict) -> None:
    """In the phase's process: becomes the command, or calls the function."""
    role, target = job["role"], job["target"]
    if isinstance(target, list) and target and all(isinstance(word, str) for word in target):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a command would inherit that
        try:
            os.execvp(target[0], target)
        except OSError as error:
            sys.exit(f"cannot run {target[0]!r}: {error.strerror}")
    try:
        module, name = target.split(":")
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        sys.exit(f"the {role} {target!r} is neither a list of words nor a module:function that can be imported: "
                 f"{type(error).__name__}: {error}")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all forks draw the same; `random` sees to that itself
    function(job["task"], Path.cwd()) if role == "harness" else grade(job, function)


def grade(job: dict, verify: Callable[[dict, Path, list[dict]], float | dict]) -> None:
    """Fetches the attempt's turns, calls a Python verifier, posts its reward."""
    def ask(path: str, body: dict | None = None) -> dict:
        headers = {"Authorization": f"Bearer {job['key']}", "Content-Type": "application/json"}
        request = urllib.request.Request(job["url"] + path, body and json.dumps(body).encode(), headers)
        for pause in (0.2, 1, 5, 10, 0):
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    return json.loads(reply.read())
            except OSError as error:
                if getattr(error, "code", 500) < 500:
                    sys.exit(f"the gateway refused {path}: {error.code} {error.read()[:500].decode(errors='replace')}")
                print(f"no answer from the gateway: {error}")
            time.sleep(pause)
        sys.exit(TEMPORARY_FAILURE)

    turns, page = [], {"next": -1}
    while page["next"] is not None:
        page = ask(f"/turns?after={page['next']}")
        turns += page["turns"]
    result = verify(job["task"], Path.cwd(), turns)
    metrics = dict(result) if isinstance(result, dict) else {"reward": result}
    reward = metrics.pop("reward", None)
    if not hasattr(reward, "__float__") or not math.isfinite(reward):
        sys.exit(f"the verifier returned {result!r}: the reward must be a finite number")
    ask("/reward", {"reward": float(reward), "metrics": {name: float(value) for name, value in metrics.items()}})


# ------------------------------------------------------------------------------------------------------- the controller


@dataclass
class Controller:
    """Each attempt is a task in `attempts`. Calls are repeated until the gateway answers, for it may be restarting."""

    url: str  # of the gateway
    key: str  # of scope admin
    name: str
    rollouts: Path
    max_running: int
    model_name: str
    preload: str
    keep_workdirs: bool
    held: float = 0.0  # seconds for which the gateway has held model calls, in all
    attempts: dict[asyncio.Task, dict] = field(default_factory=dict)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        import aiohttp  # not above: every fork would carry it

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stopping.set)
        self.start_fork_server()
        self.stopped = asyncio.create_task(self.stopping.wait())
        headers, limit = {"Authorization": f"Bearer {self.key}"}, aiohttp.ClientTimeout(60)
        async with aiohttp.ClientSession(headers=headers, timeout=limit) as self.http:
            await self.adopt("the controller was restarted")
            say(f"up to {self.max_running} rollouts at once in {self.rollouts}: plain processes, no sandbox")
            while not self.stopping.is_set():
                await self.claim(self.max_running - len(self.attempts))
            if self.attempts:
                await asyncio.wait(self.attempts)
            await self.adopt("the controller was stopped")
        self.server.kill()
        self.server.wait()

    async def claim(self, room: int) -> None:
        """Starts up to `room` rollouts, waiting for one at the gateway; without room, waits for some."""
        if not room:
            await asyncio.wait({self.stopped, *self.attempts}, return_when=asyncio.FIRST_COMPLETED)
            return
        body = {"controller": self.name, "max": room, "wait": CLAIM_SECONDS}
        if (reply := await self.call("POST", "/claim", body, patient=False)) is None:
            await self.adopt("the reply to its claim was lost")
        elif not self.stopping.is_set():
            self.held = reply["held_seconds"]
            for claim in reply["rollouts"]:
                task = asyncio.create_task(self.attempt(claim))
                self.attempts[task] = claim
                task.add_done_callback(self.attempts.pop)

    async def adopt(self, reason: str) -> None:
        """Reports as lost what is ours at the gateway but does not run here: it died with its controller."""
        running = [(claim["id"], claim["attempt"]) for claim in self.attempts.values()]
        reply = await self.call("POST", "/adopt", {"controller": self.name})
        if reply is None and not self.stopping.is_set():
            sys.exit(f"{self.url} refused POST /adopt: is it the gateway, and --secret-file its secret?")
        for claim in reply["rollouts"] if reply else ():
            if (claim["id"], claim["attempt"]) not in running:
                await self.report(claim, "lost", reason)

    async def call(self, method: str, path: str, body: dict | None = None, patient: bool = True) -> dict | None:
        """The gateway's answer; None if it refuses (4xx), or does not answer and we are not `patient` or stop."""
        import aiohttp

        pause = 0.1
        while True:
            try:
                async with self.http.request(method, self.url + path, json=body) as reply:
                    if reply.status < 400:
                        return await reply.json()
                    problem, patient = f"{reply.status} {(await reply.text())[:300]}", patient and reply.status >= 500
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                problem = f"{type(error).__name__} {error}"
            if pause in (0.1, 5):
                say(f"{method} {path}: {problem}")
            if not patient or self.stopping.is_set():
                return None
            await asyncio.wait({self.stopped}, timeout=pause)
            pause = min(2 * pause, 5)

    async def report(self, claim: dict, status: str, reason: str) -> dict | None:
        if status != "succeeded":
            say(f"{claim['id']} attempt {claim['attempt']} {status}: {reason}")
        body = {"attempt": claim["attempt"], "status": status, "reason": reason}
        return await self.call("POST", f"/rollouts/{claim['id']}/report", body)

    async def attempt(self, claim: dict) -> None:
        workdir = self.rollouts / f"{claim['id']}.{claim['attempt']}"
        try:
            status, reason = await self.judge(claim, workdir)
        except Exception as error:  # the boundary of one attempt: what goes wrong here is ours, never the agent's
            status, reason = "lost", f"controller: {type(error).__name__}: {error}"
        if status == "lost":
            await asyncio.wait({self.stopped}, timeout=1)  # whatever is short (processes, files, disk) gets time
        reply = await self.report(claim, status, reason)
        if reply and reply["status"] == "succeeded" and not self.keep_workdirs:
            await asyncio.to_thread(shutil.rmtree, workdir, ignore_errors=True)
            for role in ("harness", "verifier"):
                Path(f"{workdir}.{role}.txt").unlink(missing_ok=True)

    async def judge(self, claim: dict, workdir: Path) -> tuple[str, str]:
        """Harness, then verifier. -> (status, reason)"""
        task, path, seconds = claim["task"], f"/rollouts/{claim['id']}", float(claim["timeout"])
        agent, grader, key = task.get("agent") or {}, task.get("verifier") or {}, claim["verifier_key"]
        env = base_env() | {"HOME": str(workdir), "TMPDIR": f"{workdir}/tmp"}
        model = {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": claim["agent_key"],
                 "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": claim["agent_key"], "MODEL_NAME": self.model_name}
        ended, status, reason = await self.phase({
            "role": "harness", "target": agent.get("harness"), "task": {"id": task["id"], **agent}, "stdin": "",
            "workdir": str(workdir), "env": env | model | {"HARNESSED_TASK": f"{workdir}/task.json"}}, seconds)
        if status != "lost":
            await self.call("POST", f"{path}/agent_done", {"attempt": claim["attempt"], "exit_status": ended["status"],
                                                           "reason": reason, "output": ended["output"]})
        if status == "succeeded":
            _, status, reason = await self.phase({
                "role": "verifier", "target": grader.get("verify"), "task": task, "workdir": str(workdir),
                "env": env | {"HARNESSED_GATEWAY": self.url, "HARNESSED_ROLLOUT": claim["id"]}, "url": self.url + path,
                "key": key, "stdin": f"{key}\n{json.dumps(task)}\n"}, float(grader.get("timeout", seconds)))
        return status, reason

    async def phase(self, job: dict, seconds: float) -> tuple[dict, str, str]:
        """Has a keeper run the job, for `seconds` at most (held time apart). -> (how it ended, status, reason)"""
        ended, role = {"status": None, "output": "", "problem": "its keeper died or could not be made"}, job["role"]
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours)
            if self.server.poll() is not None:
                self.start_fork_server()
            module = job["target"].partition(":")[0] if isinstance(job["target"], str) else "os"
            socket.send_fds(self.control, [module.encode()], [theirs.fileno()])
        with contextlib.closing(writer):
            writer.write(json.dumps(job).encode() + b"\n")
            end, deadline = asyncio.create_task(reader.readline()), time.monotonic() + seconds - self.held
            while not end.done() and not self.stopping.is_set():
                if (left := deadline + self.held - time.monotonic()) <= 0:
                    self.held = (await self.call("GET", "/state") or {"held_seconds": self.held})["held_seconds"]
                    if deadline + self.held <= time.monotonic():
                        break
                    left = 1  # most likely calls are being held right now: do not ask all the time
                await asyncio.wait({end, self.stopped}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            stopped = {} if end.done() or not self.stopping.is_set() else {"problem": "the controller was stopped"}
            writer.write_eof()
            await asyncio.wait({end}, timeout=2 * KILL_SECONDS)  # for ever, if the fork server hangs in an import
            ended |= json.loads(end.done() and end.result() or "{}") | stopped
        lines = ["".join(filter(str.isprintable, line)).strip() for line in ended["output"].splitlines()]
        last, status = next(filter(None, reversed(lines)), "(no output)")[:500], ended["status"]
        if ended["problem"] or (role == "verifier" and status == TEMPORARY_FAILURE):
            return ended, "lost", f"{role}: {ended['problem'] or last}"
        if status is None:
            return ended, "failed", f"{role} timed out after {seconds:g} s"
        if status:
            by_signal = f" (signal {status - 128})" if status > 128 else ""
            return ended, "failed", f"{role} exited {status}{by_signal}: {last}"
        return ended, "succeeded", ""

    def start_fork_server(self) -> None:
        """In an environment of its own, since that is what a fork's /proc/self/environ shows."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = base_env() | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        command = [sys.executable, __file__, "--fork-server", str(theirs.fileno()), self.preload]
        with theirs:
            self.server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env,
                                           start_new_session=True)
        if self.control.recv(16) != b"ready":
            sys.exit("the controller's fork server did not start; its output is above")


def main(run_dir: Path, gateway_url: str, secret_file: Path | None = None, max_running: int = 64, name: str = "local",
         model_name: str = "policy", preload: str = "", keep_workdirs: bool = False,
         die_with_parent: bool = False) -> None:
    """Runs rollouts as local processes.

    Args:
        run_dir: Rollouts run and leave their files in RUN_DIR/rollouts.
        gateway_url: Where rollouts are claimed, and models called.
        secret_file: The run's secret, of which its keys are made; RUN_DIR/secret if not given.
        max_running: Rollouts at once.
        name: By its name a restarted controller knows what it had claimed. Two in one RUN_DIR need two.
        model_name: MODEL_NAME of the rollouts.
        preload: Modules to import before the first fork, comma-separated; others when a task first names them.
        keep_workdirs: Keep the files of rollouts that succeeded too.
        die_with_parent: Stop when the process that started this one ends.
    """
    if max_running < 1:
        sys.exit(f"--max-running is {max_running}: must be at least 1")
    if die_with_parent:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    rollouts = run_dir.resolve() / "rollouts"
    rollouts.mkdir(parents=True, exist_ok=True)
    lock = open(run_dir / f"controller-{name}.lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"a controller named {name!r} already runs in {run_dir}: end it, or give another --name")
    key = config.make_key(config.read_secret(secret_file or run_dir / "secret"), "admin")
    url = gateway_url.rstrip("/")
    asyncio.run(Controller(url, key, name, rollouts, max_running, model_name, preload, keep_workdirs).run())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fork-server"]:
        fork_server(socket.socket(fileno=int(sys.argv[2])), [name for name in sys.argv[3].split(",") if name])
    else:
        import tyro

        tyro.cli(main)

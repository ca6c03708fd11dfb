"""Runs rollouts as local processes: claims queued ones at the gateway, launches, watches, reports. Linux only.

    controller (asyncio, a task for each attempt) ──claim, agent_done, report──> gateway
      └─ fork server: single-threaded, has imported the openai client and the harness modules
           └─ keeper: one for each phase (harness, then verifier), connected to the controller
                └─ the harness or verifier, in a session, directory and environment of its own

A keeper adopts what its phase leaves behind (subreaper) and kills it all when the phase ends, uses too much, or the
connection closes: a time-out, Ctrl-C or SIGKILL of the controller leaves no process, and nothing of the harness runs
during grading. RUN_DIR/rollouts/ID.ATTEMPT has work/ (where the harness ran), verify/ (where the verifier runs: it gets
result/ out of work/, without links), harness.txt and verifier.txt (the output); it is removed after a success.

Functions are trusted code. Harness commands run in bubblewrap where the kernel allows: they see programs and their own
directory, and reach the gateway through a socket, by us. HARNESSED_SANDBOX (JSON) begins a command with which
functions and verifiers run what a model wrote. A task's `visible` names directories that its sandboxes see, too.

A harness gets base_env(), HOME and TMPDIR in its directory, MODEL_NAME, {OPENAI,ANTHROPIC}_{BASE_URL,API_KEY}, and
HARNESSED_TASK: a file with its part of the task as JSON. A verifier command gets HARNESSED_GATEWAY, HARNESSED_ROLLOUT,
on stdin a line with its key and a line with the whole task, and posts the reward itself. A verifier that exits with 75
was failed by the machinery: its attempt is lost, not failed. Statuses are as in `subprocess`: -9 is SIGKILL (from
bubblewrap: 137). If the fork server dies, the controller stops; a keeper that is killed loses its attempt, and what
this has made in the background lives on.
Run: python controller.py --help
"""

import asyncio
import contextlib
import ctypes
import gc
import hashlib
import importlib
import inspect
import json
import math
import multiprocessing
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import config

PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "USER", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
TAIL_BYTES = 4_096  # of a phase's output: sent to the gateway
CLAIM_SECONDS = 1  # how long a claim waits at the gateway for work, and so how long a controller may take to stop
KILL_SECONDS = 30  # for processes to die of SIGKILL
LOOK_SECONDS, DISK_SECONDS = 0.25, 5  # between looks at what a phase uses
OUTPUT_BYTES = 16 * 2**20  # of a phase's output; more, and the older is dropped
SCRATCH_BYTES = 2**30  # of /tmp and of /dev/shm in a sandbox
VISIBLE = "usr bin sbin lib lib32 lib64 etc/alternatives etc/ca-certificates etc/group etc/hosts etc/ld.so.cache \
    etc/ld.so.conf etc/ld.so.conf.d etc/localtime etc/mime.types etc/nsswitch.conf etc/passwd etc/pki etc/ssl"
prctl, PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = ctypes.CDLL(None).prctl, 1, 36
FORK = multiprocessing.get_context("fork")


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connect: Callable) -> None:
    """Connects a connection with another one, until both have ended."""
    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        sink.write_eof()

    with contextlib.closing(writer), contextlib.suppress(OSError):
        reader_there, writer_there = await connect()
        with contextlib.closing(writer_there):
            await asyncio.gather(pump(reader, writer_there), pump(reader_there, writer))


# In the sandbox: runs a command, and passes what connects to INSIDE_URL on to the socket that leads to the gateway.
INSIDE_URL = "http://127.0.0.1:4747"
INSIDE = f"""from __future__ import annotations
import asyncio, contextlib, os, resource, sys
{inspect.getsource(pass_on)}
async def main():
    connect = lambda: asyncio.open_unix_connection("/run/gateway")
    server = await asyncio.start_server(lambda *ends: pass_on(*ends, connect), "127.0.0.1", 4747)
    limit = lambda: resource.setrlimit(resource.RLIMIT_NPROC, (int(sys.argv[1]),) * 2)
    status = await (await asyncio.create_subprocess_exec(*sys.argv[2:], preexec_fn=limit)).wait()
    os._exit(status if status >= 0 else 128 - status)
asyncio.run(main())"""


def base_env() -> dict[str, str]:
    """Of the fork server and so of all rollouts: all that they see of our environment, and what suits many at once."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return passed | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}


def say(text: str) -> None:
    print(f"controller: {text}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------- the fork server, and what comes from its forks


def warm_up() -> None:
    """Makes a client and a call that nobody answers: what they import and cache is then there before the fork."""
    import httpcore2
    import openai

    client = openai.OpenAI(base_url="http://127.0.0.1:1", api_key="none", max_retries=0)
    with client, contextlib.suppress(openai.APIError):
        client.chat.completions.create(model="none", messages=[{"role": "user", "content": ""}], tools=[])
    # Each client loads the CA bundle, 20 ms of CPU, needed or not. The first one in each fork finds it loaded.
    make, spare = httpcore2.default_ssl_context, [httpcore2.default_ssl_context()]
    httpcore2.default_ssl_context = lambda **options: spare.pop() if spare else make(**options)


def fork_server(listening: str, *modules: str) -> None:
    """Forks a keeper for each connection to the socket (its file descriptor), until the controller is gone."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    listener = socket.socket(fileno=int(listening))
    warm_up()
    for module in modules:
        say(f"importing {module}")  # the last word, if that never returns
        importlib.import_module(module)
    gc.freeze()  # a collection in a fork would touch, and so copy, every page
    os.dup2(2, 1)  # the end of our standard output tells the controller that we are ready
    while True:
        link, _ = listener.accept()
        with link:
            if struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] != os.getuid():
                continue  # another user of this machine: to an abstract socket, everybody may connect
            try:
                FORK.Process(target=keep, args=(listener, link)).start()
            except OSError as error:  # the controller sees `link` closed
                say(f"cannot fork: {error}")


def keep(listener: socket.socket, link: socket.socket) -> None:
    """A keeper's life. A job comes by `link`; its process runs until it ends or `link` closes; all it left is killed.

    Back goes how it ended: {"status": as in subprocess, None if killed, "output": its end, "excess": what it used too
    much of, "problem": if one of ours}.
    """
    listener.close()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    job = json.loads(link.makefile("rb").readline())
    ended = {"status": None, "output": "", "excess": "", "problem": ""}
    try:
        for kind, most in ((resource.RLIMIT_CPU, job["limits"]["CPU seconds"]), (resource.RLIMIT_CORE, 0),
                           (resource.RLIMIT_FSIZE, int(job["limits"]["GB of disk"] * 2**30))):
            resource.setrlimit(kind, (most, most))
        make_room(job, Path(job["workdir"]))
        path = Path(job["workdir"]).with_name(f"{job['role']}.txt")
        path.unlink(missing_ok=True)  # a link, perhaps
        with path.open("a+b") as output:
            process = FORK.Process(target=perform, args=(job, output.fileno(), link))
            process.start()
            pidfd = os.pidfd_open(process.pid)
            ready, ended["excess"] = watch(job, pidfd, link, output.fileno())
            if pidfd in ready:
                process.join()
                ended["status"] = process.exitcode
            end_children()
            output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
            ended["output"] = output.read().decode(errors="replace")
            output.truncate(min(output.tell(), OUTPUT_BYTES))
    except (OSError, ValueError) as error:  # the second: a limit of ours is over the system's
        ended["problem"] = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # there may be no controller any more
        link.sendall(json.dumps(ended).encode() + b"\n")


def make_room(job: dict, workdir: Path) -> None:
    """A fresh directory for a phase; the verifier's has the harness's result, in which only files have remained."""
    if job["role"] == "harness":
        shutil.rmtree(workdir.parent, ignore_errors=True)
        workdir.mkdir(parents=True)
        (workdir / "task.json").write_text(json.dumps(job["task"]))
    else:
        workdir.mkdir()
        result = workdir.parent / "work" / "result"
        subprocess.run(["find", result, "!", "-type", "f", "!", "-type", "d", "-delete"], stderr=subprocess.DEVNULL)
        if result.is_dir():
            result.rename(workdir / "result")
    for part in ("result", "tmp"):
        (workdir / part).mkdir(exist_ok=True)


def watch(job: dict, pidfd: int, link: socket.socket, output: int) -> tuple[list, str]:
    """Waits until the process ends, `link` closes or a limit is passed. -> (which of the two, what was too much)"""
    disk_at, limits = time.monotonic() + DISK_SECONDS, job["limits"]
    while not (ready := select.select([pidfd, link], [], [], LOOK_SECONDS)[0]):
        if os.fstat(output).st_size > OUTPUT_BYTES:
            os.truncate(output, 0)
        start = time.monotonic()
        for what, amount in usage(Path(job["workdir"]).parent if start > disk_at else None).items():
            if amount > limits[what]:
                return [], f"used more than {limits[what]:g} {what}"
        if start > disk_at:  # a large tree is looked at less often
            disk_at = time.monotonic() + max(DISK_SECONDS, 50 * (time.monotonic() - start))
    return ready, ""


def usage(directory: Path | None) -> dict[str, float]:
    """What all processes below this one use together; with a `directory`, also what is in it, and files without a name
    that they hold open."""
    pids, pages, nameless = children("self", os.getpid()), 0, {}
    for pid in pids:  # which grows meanwhile
        with contextlib.suppress(OSError):  # it has ended
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            for thread in os.listdir(f"/proc/{pid}/task"):
                pids += children(pid, thread)
            for file in map(os.stat, Path(f"/proc/{pid}/fd").iterdir()) if directory else ():
                if not file.st_nlink:
                    nameless[file.st_dev, file.st_ino] = 512 * file.st_blocks
    used = {"GB of memory": pages * resource.getpagesize() / 2**30, "processes": len(pids)}
    if directory:
        du = subprocess.run(["du", "-skx", directory], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
        used["GB of disk"] = int((du.split() or [0])[0]) / 2**20 + sum(nameless.values()) / 2**30
    return used


def children(pid: int | str, thread: int | str) -> list[str]:
    return Path(f"/proc/{pid}/task/{thread}/children").read_text().split()


def end_children() -> None:
    """Kills our children until there are none: when one dies, its own come to us."""
    while pids := children("self", os.getpid()):
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def perform(job: dict, output: int, link: socket.socket) -> None:
    """In the phase's process: becomes the command, or calls the function."""
    link.close()
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    Path("/proc/self/oom_score_adj").write_text("1000")  # where memory ends all the same, we go, not the trainer
    os.chdir(workdir := job["workdir"])
    os.environ |= {"HOME": workdir, "TMPDIR": f"{workdir}/tmp", "HARNESSED_TASK": f"{workdir}/task.json"} | job["env"]
    stdin = os.memfd_create("stdin")
    os.pwrite(stdin, job["stdin"].encode(), 0)
    for fd, standard in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(fd, standard)
    role, target = job["role"], job["target"]
    try:
        if target and isinstance(target, list):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a command would inherit that
            os.execvp(target[0], target)
        module, name = target.split(":")
        function = getattr(importlib.import_module(module), name)
    except Exception as error:
        sys.exit(f"the {role} {target!r} is neither a command that can be run nor a module:function that can be "
                 f"imported: {type(error).__name__}: {error}")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all forks draw the same; `random` sees to that itself
    function(job["task"], Path.cwd()) if role == "harness" else grade(job, function)


def grade(job: dict, verify: Callable[[dict, Path, list[dict]], float | dict]) -> None:
    """Fetches the attempt's turns, calls a Python verifier, posts its reward: by the openai client, which retries."""
    import openai

    gateway = openai.OpenAI(base_url=job["url"], api_key=job["key"], max_retries=5)
    try:
        turns, after = [], -1
        while after is not None:
            page = gateway.get(f"/turns?after={after}", cast_to=object)
            turns, after = turns + page["turns"], page["next"]
        result = verify(job["task"], Path.cwd(), turns)
        metrics = dict(result) if isinstance(result, dict) else {"reward": result}
        reward = metrics.pop("reward", None)
        if not hasattr(reward, "__float__") or not math.isfinite(reward):
            sys.exit(f"the verifier returned {result!r}: the reward must be a finite number")
        metrics = {name: float(value) for name, value in metrics.items()}
        gateway.post("/reward", cast_to=object, body={"reward": float(reward), "metrics": metrics})
    except (openai.APIConnectionError, openai.InternalServerError) as error:
        print(f"no answer: {error}")
        sys.exit(os.EX_TEMPFAIL)


# ------------------------------------------------------------------------------------------------------- the controller


@dataclass
class Controller:
    """Runs rollouts as local processes."""

    run_dir: Path  # Rollouts run and leave their files in RUN_DIR/rollouts.
    gateway_url: str  # Where rollouts are claimed, and models called.
    secret_file: Path | None = None  # The run's secret, of which its keys are made; RUN_DIR/secret if not given.
    max_running: int = 64  # Rollouts at once.
    name: str = "local"  # A restarted controller knows by it what it had claimed. Two in one RUN_DIR need two.
    model_name: str = "policy"  # MODEL_NAME of the rollouts.
    preload: str = ""  # Modules to import once, before the forks, comma-separated; others cost time in each rollout.
    isolation: Literal["auto", "none", "bubblewrap"] = "auto"  # Of harness commands, and of what models write.
    max_memory: float = 8.0  # GB of memory that the processes of a rollout use at once, all together.
    max_processes: int = 512  # Processes of a rollout at once.
    max_disk: float = 8.0  # GB that a rollout has on the disk, all files together.
    max_cpu_seconds: int = 3600  # CPU seconds of each process.

    def __post_init__(self) -> None:
        for name in ("max_running", "max_memory", "max_processes", "max_disk", "max_cpu_seconds"):
            if getattr(self, name) <= 0:
                sys.exit(f"--{name.replace('_', '-')} is {getattr(self, name)}: must be greater than 0")
        self.url, self.rollouts = self.gateway_url.rstrip("/"), self.run_dir.resolve() / "rollouts"
        self.rollouts.mkdir(parents=True, exist_ok=True)
        self.secret_file = (self.secret_file or self.run_dir / "secret").resolve()
        self.key = config.make_key(config.read_secret(self.secret_file), "admin")
        self.limits = {"GB of memory": self.max_memory, "processes": self.max_processes, "GB of disk": self.max_disk,
                       "CPU seconds": self.max_cpu_seconds}
        # An abstract socket: its name is free as soon as we are dead, and tells a second controller that we are not.
        self.address = "\0harnessed-" + hashlib.sha256(f"{self.rollouts}/{self.name}".encode()).hexdigest()
        self.entrance = Path(tempfile.gettempdir(), self.address[1:43])  # a socket file: from sandboxes to the gateway
        self.no_sandbox = self.probe_isolation()
        self.held = 0.0  # seconds for which the gateway has held model calls, in all, as far as we know
        self.attempts: dict[asyncio.Task, dict] = {}  # a task for each, and what was claimed

    def sandbox(self, workdir: Path, *visible: Path | str) -> list[str]:
        """A command's beginning: bubblewrap, with users, processes, network and files of its own. It sees programs and
        libraries, what is `visible`, nothing else of the run; it writes in `workdir` and, so much, in memory. Outside,
        its user is ours, so that results are; if that is root, who may write /proc/sys by that alone, /proc must be
        read-only."""
        scratch, run_dir = ["--size", str(SCRATCH_BYTES), "--tmpfs"], str(self.rollouts.parent)
        seen = [sys.prefix, sys.base_prefix, *visible, *(f"/{path}" for path in VISIBLE.split())]
        return [
            "bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534",
            "--die-with-parent", "--proc", "/proc", "--dev", "/dev", *scratch, "/dev/shm", *scratch, "/tmp",
            *(part for path in seen for part in ("--ro-bind-try", str(path), str(path))), "--tmpfs", run_dir,
            "--ro-bind", "/dev/null", str(self.secret_file), "--ro-bind-try", str(self.entrance), "/run/gateway",
            "--bind", str(workdir), str(workdir),
            *(part for path in ("/proc", run_dir, "/dev", "/") for part in ("--remount-ro", path))]

    def inside(self, workdir: Path, *visible: Path | str) -> list[str]:
        """A harness command's beginning: the sandbox, and in it what leads to the gateway."""
        return [*self.sandbox(workdir, *visible), sys.executable, "-ISc", INSIDE, str(self.max_processes)]

    def probe_isolation(self) -> str:
        """Why there is no sandbox; nothing if there is."""
        if self.isolation == "none":
            return "--isolation none"
        tried = subprocess.run(["env", *self.inside(self.rollouts), "true"], capture_output=True, text=True)
        problem = tried.returncode and f"{tried.returncode}: {tried.stderr.strip()}"
        if problem and self.isolation == "bubblewrap":
            sys.exit(f"--isolation is bubblewrap, which does not work here: {problem}")
        return problem or ""

    def start_fork_server(self) -> None:
        """In an environment of its own, since that is what a fork's /proc/self/environ shows."""
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(self.address)
            except OSError:
                sys.exit(f"a controller {self.name!r} already runs in {self.run_dir}: end it, or give another --name")
            listener.listen(4096)
            program = f"import sys; sys.path = {sys.path}; import controller; controller.fork_server(*sys.argv[1:])"
            modules, fd = filter(None, self.preload.split(",")), listener.fileno()
            self.server = subprocess.Popen([sys.executable, "-c", program, str(fd), *modules], pass_fds=[fd],
                                           env=base_env(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                           start_new_session=True)
        self.server.stdout.read()  # until it is ready, or dead

    async def run(self) -> None:
        import aiohttp  # not above: every fork would carry it

        self.stop = asyncio.get_running_loop().create_future()  # done, by cancelling, once we stop
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop.cancel)
        headers, limit = {"Authorization": f"Bearer {self.key}"}, aiohttp.ClientTimeout(60)
        async with aiohttp.ClientSession(headers=headers, timeout=limit) as self.http:
            await self.adopt("the controller was restarted")
            url = urlsplit(self.url)
            connect = lambda: asyncio.open_connection(url.hostname, url.port or 80)  # noqa: E731
            await asyncio.start_unix_server(lambda *ends: pass_on(*ends, connect), self.entrance)
            how = f"NO SANDBOX ({self.no_sandbox})" if self.no_sandbox else "commands in bubblewrap, functions trusted"
            say(f"up to {self.max_running} rollouts at once in {self.rollouts}: {how}")
            while not self.stop.done() and self.server.poll() is None:
                await self.claim(self.max_running - len(self.attempts))
            self.stop.cancel()
            if self.attempts:
                await asyncio.wait(self.attempts)
        self.entrance.unlink(missing_ok=True)  # whoever cleans up temporary files may have been faster
        if self.server.poll() is not None:
            sys.exit(f"the controller's fork server ended with status {self.server.returncode}; see above")

    async def claim(self, room: int) -> None:
        """Starts up to `room` rollouts, waiting for one at the gateway; without room, waits for some."""
        if not room:
            await asyncio.wait({self.stop, *self.attempts}, return_when=asyncio.FIRST_COMPLETED)
            return
        body = {"controller": self.name, "max": room, "wait": CLAIM_SECONDS}
        if not (reply := await self.call("/claim", body, patient=False)):
            return await self.adopt("the reply to its claim was lost")
        self.held = reply["held_seconds"]
        for claim in reply["rollouts"]:  # if we are stopping, they end at once
            task = asyncio.create_task(self.attempt(claim))
            self.attempts[task] = claim
            task.add_done_callback(self.attempts.pop)

    async def adopt(self, reason: str) -> None:
        """Reports as lost what is ours at the gateway but does not run here: it died with its controller."""
        running = [(claim["id"], claim["attempt"]) for claim in self.attempts.values()]
        reply = await self.call("/adopt", {"controller": self.name})
        if not reply and not self.stop.done():
            sys.exit(f"{self.url} refused /adopt: is it the gateway, and --secret-file its secret?")
        for claim in reply.get("rollouts", ()):
            if (claim["id"], claim["attempt"]) not in running:
                await self.report(claim, "lost", reason)

    async def call(self, path: str, body: dict | None = None, patient: bool = True) -> dict:
        """The answer of the gateway, which may be restarting; {} if it refuses (4xx), we are not `patient` or stop."""
        import aiohttp

        while True:
            try:
                async with self.http.request("POST" if body else "GET", self.url + path, json=body) as reply:
                    if reply.status < 400:
                        return await reply.json()
                    problem, patient = f"{reply.status} {(await reply.text())[:300]}", patient and reply.status >= 500
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                problem = f"{type(error).__name__} {error}"
            say(f"{path}: {problem}")
            if not patient or self.stop.done():
                return {}
            await asyncio.wait({self.stop}, timeout=1)

    async def report(self, claim: dict, status: str, reason: str) -> dict:
        if status != "succeeded":
            say(f"{claim['id']} attempt {claim['attempt']} {status}: {reason}")
        body = {"attempt": claim["attempt"], "status": status, "reason": reason}
        return await self.call(f"/rollouts/{claim['id']}/report", body)

    async def attempt(self, claim: dict) -> None:
        directory = self.rollouts / f"{claim['id']}.{claim['attempt']}"
        try:
            status, reason = await self.judge(claim, directory / "work")
        except Exception as error:  # the boundary of one attempt: what goes wrong here is ours, never the agent's
            status, reason = "lost", f"controller: {type(error).__name__}: {error}"
        if status == "lost":
            await asyncio.wait({self.stop}, timeout=1)  # whatever is short (processes, files, disk) gets time
        reply = await self.report(claim, status, reason)
        if reply.get("status") == "succeeded":
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def judge(self, claim: dict, workdir: Path) -> tuple[str, str]:
        """Harness, then verifier. -> (status, reason)"""
        task, path, seconds, key = claim["task"], f"/rollouts/{claim['id']}", claim["timeout"], claim["verifier_key"]
        agent, grader = task.get("agent") or {}, task.get("verifier") or {}
        confined, visible = isinstance(agent.get("harness"), list) and not self.no_sandbox, task.get("visible", [])
        url = INSIDE_URL + urlsplit(self.url).path if confined else self.url
        ended, status, reason = await self.phase({
            "role": "harness", "target": agent.get("harness"), "task": {"id": task["id"], **agent}, "stdin": "",
            "workdir": str(workdir), "confined": confined, "visible": visible, "env": {
                "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": claim["agent_key"],
                "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": claim["agent_key"],
                "MODEL_NAME": self.model_name}}, seconds)
        await self.call(f"{path}/agent_done", {"attempt": claim["attempt"], "exit_status": ended["status"],
                                               "reason": reason, "output": ended["output"]})
        if status == "succeeded":  # only a command has the key on stdin: what a function runs would inherit it
            _, status, reason = await self.phase({
                "role": "verifier", "target": grader.get("verify"), "task": task, "confined": False,
                "workdir": str(workdir.with_name("verify")), "visible": visible,
                "stdin": f"{key}\n{json.dumps(task)}\n" if isinstance(grader.get("verify"), list) else "",
                "env": {"HARNESSED_GATEWAY": self.url, "HARNESSED_ROLLOUT": claim["id"]},
                "url": self.url + path, "key": key}, grader.get("timeout", seconds))
        return status, reason

    async def phase(self, job: dict, seconds: float) -> tuple[dict, str, str]:
        """Has a keeper run the job, for `seconds` at most (held time apart). -> (how it ended, status, reason)"""
        role, (reader, writer) = job["role"], await asyncio.open_unix_connection(self.address)
        places = [job["workdir"], *job["visible"]]
        if job["confined"] and job["target"]:
            job["target"] = [*self.inside(*places), *job["target"]]
        elif not self.no_sandbox:
            job["env"]["HARNESSED_SANDBOX"] = json.dumps(self.sandbox(*places))
        job["limits"] = self.limits
        with contextlib.closing(writer):
            writer.write(json.dumps(job).encode() + b"\n")
            end, left, held = asyncio.create_task(reader.readline()), seconds, self.held
            while left and not (await asyncio.wait({end, self.stop}, timeout=left, return_when="FIRST_COMPLETED"))[0]:
                self.held = (await self.call("/state")).get("held_seconds", self.held)
                left = max(self.held - held, 1) if self.held > held else 0  # what was held meanwhile; do not ask often
                held = self.held
            writer.write_eof()  # ends what still runs
            if not (line := await asyncio.wait_for(end, KILL_SECONDS)):
                raise EOFError(f"the keeper of the {role} died or could not be made")
        ended = json.loads(line)
        status, last = ended["status"], (ended["output"].strip().splitlines() or ["(no output)"])[-1][:500]
        lost = "the controller was stopped" if status is None and self.stop.done() else ended["problem"]
        if lost or (role == "verifier" and status == os.EX_TEMPFAIL):
            return ended, "lost", f"{role}: {lost or last}"
        if status == 0:
            return ended, "succeeded", ""
        how = f"timed out after {seconds:g} s" if status is None else f"exited {status}: {last}"
        return ended, "failed", f"{role} {ended['excess'] or how}"


if __name__ == "__main__":
    import tyro

    controller = tyro.cli(Controller)
    controller.start_fork_server()
    asyncio.run(controller.run())

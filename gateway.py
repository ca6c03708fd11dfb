"""The gateway: rollouts, their keys, the model proxy that harnesses call, the turn log, and the hold during an update.

    trainer --POST /rollouts--> queue --POST /claim--> controller --agent key--> harness (--verifier key--> verifier)
    harness --/v1/chat/completions--> [key, limits] -> gate -> render -> gate -> generate -> derender -> log -> reply
    trainer --/pause--> the gate closes: new calls wait at it; generations that the engine aborts come back with their
            ids, wait at it too, and go on from those ids after /resume. The harness sees one slow reply.
    trainer <--GET /finished (long poll)-- rollouts in the order in which they ended

One process, one event loop, one SQLite connection (WAL), which is the state: in memory besides it are the open calls
and a cache. What is written is committed before the next `await`, so a transaction is what happens between two of them,
and before the reply that depends on it: `kill -9` loses nothing that was acknowledged (synchronous=NORMAL: a power cut
may take the last moments, never half of one). What a killed gateway was sampling is gone with its connections;
harnesses retry.

Left out, for now: other dialects than chat completions, streaming token by token, replaying or joining retried calls,
splicing sampled ids into prompts, stop strings (they are counted as overridden).

    python gateway.py --run-dir runs/demo --engine-url http://127.0.0.1:8000 --engine-key-file K --port 8100
It makes runs/demo/{gateway.sqlite,secret} where they are missing. Its log is JSON lines on stderr.
"""

import asyncio
import contextlib
import ctypes
import functools
import hashlib
import hmac
import os
import re
import signal
import socket
import sqlite3
import sys
import time
import traceback
import zlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
import orjson
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError, validate_call
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import dialects
from config import make_key, read_secret
from dialects import ApiError

JSON = dict[str, Any]
MAX_BRANCHES = 8  # cached token sequences of one attempt; what continues an older one is only stored less compactly
MAX_EVENT = 256 * 1024  # bytes
STREAM_ABOVE = 256  # plain calls for more tokens than this stream from the engine, so that its death loses few
STRAGGLER_SECONDS = 5.0  # after a pause, a request that waits inside the paused engine is taken back
RETRY_AFTER = {429: {"retry-after": "1"}, 503: {"retry-after": "5"}}
DROPPED = ("logit_bias", "response_format", "stop", "logprobs", "top_logprobs", "structured_outputs", "guided_json")
OVERFLOW = re.compile(r"maximum (context|model) length|context length|max_model_len", re.IGNORECASE)
# turns.ids: int32, prompt and response without the first `shared`, which are those of turn `parent`; logprobs: float64
# messages: a message and (`before`) the conversation before it, addressed by the hash of both
SCHEMA = """
CREATE TABLE IF NOT EXISTS groups(name TEXT PRIMARY KEY, body BLOB);
CREATE TABLE IF NOT EXISTS rollouts(id TEXT PRIMARY KEY, "group" TEXT, "index" INT, kind TEXT,
    status TEXT DEFAULT 'queued', attempts INT DEFAULT 0, controller TEXT, agent_over INT DEFAULT 0, exit_status INT,
    machinery TEXT, reason TEXT DEFAULT '', reward REAL, metrics TEXT DEFAULT '{}', truncated INT DEFAULT 0,
    turns INT DEFAULT 0, calls INT DEFAULT 0, sampled_tokens INT DEFAULT 0, version_min INT, version_max INT,
    seq INT UNIQUE, started_at REAL, finished_at REAL);
CREATE INDEX IF NOT EXISTS rollouts_status ON rollouts(status);
CREATE TABLE IF NOT EXISTS turns(rollout TEXT, attempt INT, "index" INT, parent INT, shared INT, prompt INT, ids BLOB,
    logprobs BLOB, versions BLOB, finish_reason TEXT, request BLOB, reply BLOB, status TEXT, error TEXT,
    started_at REAL, finished_at REAL, PRIMARY KEY(rollout, attempt, "index"));
CREATE TABLE IF NOT EXISTS messages(hash BLOB PRIMARY KEY, before BLOB, data BLOB);
CREATE TABLE IF NOT EXISTS events(rollout TEXT, attempt INT, kind TEXT, data BLOB, at REAL);
CREATE TABLE IF NOT EXISTS steps(step INT PRIMARY KEY, data BLOB);
CREATE TABLE IF NOT EXISTS counts(name TEXT PRIMARY KEY, n INT);
CREATE TABLE IF NOT EXISTS hold(one INT PRIMARY KEY, data BLOB);
"""


@dataclass
class GatewaySettings:
    """Serves rollouts and the model API."""

    run_dir: Path  # Directory of this run, for the log.
    engine_url: str  # Engine that speaks vLLM's routes, e.g. http://127.0.0.1:8000
    port: int = 0  # Port to listen on. 0: a free one, which the first log line tells.
    host: str = "127.0.0.1"  # Address to listen on.
    secret_file: Path | None = None  # What all keys are made from. None: RUN_DIR/secret, made if missing.
    engine_key_file: Path | None = None  # File with the engine's bearer key.
    engine_retry: float = 60.0  # Seconds for which a call waits for an engine that fails before it gets 503.
    max_open_calls: int = 64  # Open model calls of one rollout; more get 429.
    max_body: int = 64 * 2**20  # Bytes of one request; more get 413.
    keepalive: float = 15.0  # Seconds of silence after which a waiting stream gets an empty event.
    die_with_parent: bool = False  # End when the process that started this one ends.


# ---- what clients send; the rest is in the handlers' signatures, which pydantic checks

Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Limit = Annotated[int, Field(ge=1, le=1000)]
Seconds = Annotated[float, Field(ge=0, le=1e6)]
CHECKS = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


class Sampling(BaseModel, **CHECKS, extra="forbid"):
    """What decides how tokens are sampled; a harness's own wishes are overridden. Defaults: the plain distribution."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Int = -1
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = Field(1.0, gt=0)
    seed: Int | None = None
    max_tokens: Count | None = None


class Task(BaseModel, **CHECKS, extra="allow"):
    id: str
    agent: JSON = {}
    verifier: JSON = {}


class Group(BaseModel, **CHECKS, extra="forbid"):
    group: str = Field(pattern=r"^[A-Za-z0-9_.]{1,72}$")
    n: int = Field(ge=1, le=4096)
    task: Task
    kind: Literal["train", "eval"] = "train"
    sampling: Sampling = Sampling()
    timeout: float = Field(600.0, gt=0)
    max_attempts: Count = 3
    on_failure: Literal["zero", "drop"] = "zero"
    context_limit: Count | None = None


# ---- helpers


def runs(row: sqlite3.Row, attempt: int) -> bool:
    return row["status"] == "running" and row["attempts"] == attempt


def log(event: str, **fields: Any) -> None:
    with contextlib.suppress(OSError):  # a parent that stopped reading must not stop calls
        os.write(2, orjson.dumps({"at": round(time.time(), 3), "event": event, **fields}) + b"\n")


def packed(data: Any) -> bytes:
    return zlib.compress(orjson.dumps(data), 1)


def common_ids(a: bytes, b: bytes) -> int:
    """Number of leading int32 ids that two sequences share: they end before the lowest bit that differs."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // 4
    differing = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    return ((differing & -differing).bit_length() - 1) // 32


class Branches(dict[int, bytes]):
    """The token sequences of an attempt that no later turn continues, by turn."""

    def add(self, index: int, ids: bytes) -> tuple[int, int]:
        """-> the turn with the longest common beginning, and that beginning's length in ids."""
        shared, parent = max(((common_ids(branch, ids), turn) for turn, branch in self.items()), default=(0, -1))
        if len(self.get(parent, b"")) == 4 * shared:
            self.pop(parent, None)
        elif len(self) >= MAX_BRANCHES:
            del self[next(iter(self))]
        self[index] = ids
        return parent, shared


@dataclass(eq=False)
class Call:
    """One model call and all that is known of its tokens. It outlives no connection, so far."""

    owner: tuple[str, int]  # rollout, attempt
    name: str
    head: JSON  # what a completion and each chunk of its stream begin with
    body: JSON  # the harness's request
    chat: JSON  # what of it the engine gets
    sampling: JSON
    stream: bool
    max_tokens: int
    room: int  # tokens that the context has; once the prompt is known, what it has left
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    part: int = 0  # where the current engine request began in `ids`
    finish: str = ""
    started_at: float = field(default_factory=time.time)
    index: int | None = None  # of the logged turn
    begun: bool = False  # some of the reply is sent
    task: "asyncio.Task[JSON]" = field(init=False)

    def continuation(self) -> JSON:
        """The engine request that goes on from the prompt and the ids kept so far."""
        self.part = len(self.ids)
        sampling = {key: value for key, value in self.sampling.items() if value is not None}
        if "seed" in sampling:  # its own for each call, or a group would be n equal rollouts
            sampling["seed"] = zlib.crc32(f"{sampling['seed']}/{self.name}/{self.part}".encode())
        return {"model": self.chat["model"], "token_ids": self.prompt_ids + self.ids,
                "stream": self.stream or self.max_tokens > STREAM_ABOVE,
                "sampling_params": {**sampling, "max_tokens": self.max_tokens - self.part, "logprobs": 0}}

    async def receive(self, response: aiohttp.ClientResponse, version: int) -> None:
        """Keeps what the engine sampled. `version`: of the weights, where the engine does not say."""
        if response.content_type != "text/event-stream":
            return self.keep(orjson.loads(await response.read())["choices"][0], version)
        async for line in response.content:
            if line.startswith(b"data: {"):
                self.keep(orjson.loads(line[6:])["choices"][0], version)

    def keep(self, choice: JSON, version: int) -> None:
        ids = choice.get("token_ids") or []
        self.ids += ids
        self.logprobs += [item.get("logprob") for item in (choice.get("logprobs") or {}).get("content") or ()]
        self.versions += [version] * len(ids)
        for span in choice.get("weight_versions") or ():
            if str(span["version"]).isdigit():
                start, end = self.part + span["start"], min(self.part + span["end"], len(self.ids))
                self.versions[start:end] = [int(span["version"])] * (end - start)
        finish = choice.get("finish_reason")
        if finish and finish != "abort":
            self.finish = finish
        elif len(self.ids) >= self.max_tokens:
            self.finish = "length"

    async def send(self, send: Callable[[Any], Awaitable[None]], body: bytes, status: int = 200,
                   more: bool = False) -> None:
        """A part of the reply. Before the first one go the status and, in a stream, the first event."""
        if not self.begun:
            stream = self.stream and status == 200
            media = "text/event-stream" if stream else "application/json"
            headers = {"content-type": media, **RETRY_AFTER.get(status, {})}
            await send({"type": "http.response.start", "status": status,
                        "headers": [(name.encode(), value.encode()) for name, value in headers.items()]})
            if stream:
                body = dialects.chat_chunk(self.head, {"role": "assistant", "content": ""}) + body
        self.begun = True
        await send({"type": "http.response.body", "body": body, "more_body": more})


class Engine:
    """The engine's routes, asked until they answer, and the gate before them. A pause is a lease; it and the time spent
    paused survive a restart. The engine's own pause is the trainer's business (vllm_control)."""

    def __init__(self, settings: GatewaySettings, db: sqlite3.Connection) -> None:
        self.url, self.patience, self.db = settings.engine_url.rstrip("/"), settings.engine_retry, db
        key = settings.engine_key_file.read_text().strip() if settings.engine_key_file else ""
        self.headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.http: aiohttp.ClientSession
        self.model: JSON | None = None
        self.in_flight: set[asyncio.Timeout] = set()
        saved = db.execute("SELECT data FROM hold").fetchone()
        self.hold: JSON = orjson.loads(saved[0]) if saved else {
            "paused": False, "version": 0, "lease_until": 0.0, "since": 0.0, "before": 0.0}
        self.resumed = asyncio.Event()

    def held_seconds(self) -> float:
        """Seconds in which calls were held, ever. An expired lease holds nothing."""
        end = min(time.time(), self.hold["lease_until"])
        return self.hold["before"] + (max(0.0, end - self.hold["since"]) if self.hold["paused"] else 0.0)

    def set_hold(self, paused: bool, lease: float, version: int) -> JSON:
        now, before, was = time.time(), self.held_seconds(), self.hold["paused"]
        hold = {"paused": paused, "version": version, "lease_until": now + lease, "since": now, "before": before}
        self.db.execute("INSERT OR REPLACE INTO hold VALUES(1, ?)", (orjson.dumps(hold),))
        self.db.commit()
        self.hold = hold
        self.resumed.clear() if paused else self.resumed.set()
        for limit in self.in_flight if paused != was else ():  # it may sleep only once nothing is in flight
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time() + STRAGGLER_SECONDS if paused else None)
        return {"in_flight": len(self.in_flight), "version": version}

    async def gate(self) -> bool:
        """Returns when not paused: whether it waited. If not, it gave no way: what follows at once is not paused."""
        waited = False
        while self.hold["paused"]:
            left, waited = self.hold["lease_until"] - time.time(), True
            if left <= 0:
                raise ApiError(503, "the trainer's pause has expired: it died or hangs; retry later", "pause_expired")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.resumed.wait(), left)
        return waited

    async def card(self) -> JSON:
        """The engine's model: {"id", "max_model_len"?, ...}."""
        self.model = self.model or (await self.ask("/v1/models"))["data"][0]
        return self.model

    async def ask(self, path: str, body: JSON | None = None, gated: bool = True, call: Call | None = None) -> Any:
        """The JSON of the first answer that is a result. A `call` receives its answer itself, and each try continues
        it until it is finished. A try that brought tokens, or was held, starts the patience anew.
        ApiError: 400 the engine's, 503 no engine."""
        pause, deadline = 0.0, 0.0
        while True:
            if (gated or deadline) and await self.gate():
                pause = deadline = 0.0
            limit, kept = asyncio.timeout(None), len(call.ids) if call else 0
            self.in_flight.add(limit)
            try:
                data = orjson.dumps(call.continuation() if call else body) if call or body else None
                async with limit, self.http.request("POST" if data else "GET", self.url + path, data=data) as response:
                    if response.status in (400, 413, 422):
                        raise refusal(await response.read())
                    if response.status != 200:
                        raise ValueError(f"{response.status} {(await response.text('utf-8', 'replace'))[:300]}")
                    if not call:
                        return orjson.loads(await response.read())
                    await call.receive(response, self.hold["version"])
                    fault = ValueError("the reply ended without a finish reason, or was aborted")
            except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
                fault = error  # the last three: the answer is not of the agreed shape
            finally:
                self.in_flight.discard(limit)
            if call and call.finish:
                return None
            self.model = None  # another engine may come up in its place
            if not deadline or (call and len(call.ids) > kept):
                pause, deadline = 0.0, time.monotonic() + self.patience
            elif time.monotonic() >= deadline:
                raise ApiError(503, f"engine {self.url}{path} kept failing: {fault!r}", "engine_unavailable")
            elif pause == 0.05:
                log("engine_retry", path=path, error=repr(fault))
            await asyncio.sleep(pause)  # at first not at all: a stale idle socket
            pause = min(1.0, 2 * pause or 0.05)


def refusal(body: bytes) -> ApiError:
    """The engine's 400 as the harness sees it. vLLM: {"error": {"message"}}."""
    message = body[:1000].decode("utf-8", "replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        message = str(orjson.loads(body)["error"]["message"])
    return ApiError(400, message, "context_length_exceeded" if OVERFLOW.search(message) else None)


class Gateway:
    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.secret = read_secret(settings.secret_file or settings.run_dir / "secret")
        self.db = sqlite3.connect(settings.run_dir / "gateway.sqlite", timeout=0)
        self.db.row_factory = sqlite3.Row
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL"):
            self.db.execute(f"PRAGMA {pragma}")
        self.db.executescript(SCHEMA)
        self.engine = Engine(settings, self.db)
        self.bell = asyncio.Event()  # for long polls; replaced when set
        self.branches: dict[tuple[str, int], Branches] = {}  # of running attempts; made from the log where missing
        self.calls: set[Call] = set()  # that are open

    def count(self, name: str) -> None:
        self.db.execute("INSERT INTO counts VALUES(?, 1) ON CONFLICT(name) DO UPDATE SET n = n + 1", (name,))

    def event(self, rollout: str, attempt: int, kind: str, data: Any) -> None:
        self.db.execute("INSERT INTO events VALUES(?, ?, ?, ?, ?)", (rollout, attempt, kind, packed(data), time.time()))

    def set(self, rollout: str, **columns: Any) -> None:
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self.db.execute(f"UPDATE rollouts SET {assignments} WHERE id = ?", (*columns.values(), rollout))

    def rollouts(self, where: str, *values: Any) -> list[sqlite3.Row]:
        sql = f'SELECT rollouts.rowid, rollouts.*, body FROM rollouts JOIN groups ON "group" = name WHERE {where}'
        return self.db.execute(sql, values).fetchall()

    def rollout(self, rollout: str) -> sqlite3.Row:
        if not (rows := self.rollouts("id = ?", rollout)):
            raise ApiError(404, f"no rollout {rollout[:100]!r}", "not_found")
        return rows[0]

    # ---- requests

    def identify(self, request: Request, scopes: str) -> tuple[str, str, int]:
        """Scope, rollout and attempt of the request's key."""
        header = request.headers.get("authorization", "")
        key = header[7:] if header[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        scope, rollout, number, *_ = [*key.split("-"), "", "", ""]
        attempt = int(number) if re.fullmatch(r"[0-9]{1,9}", number) else 0
        if not hmac.compare_digest(make_key(self.secret, scope, rollout, attempt).encode(), key.encode()):
            raise ApiError(401, "missing or wrong key: send this rollout's key as bearer token", "invalid_api_key")
        if scope not in scopes.split():
            raise ApiError(403, f"a key of scope {scope!r} may not call this route", "wrong_scope")
        if scope != "admin":
            row = self.rollout(rollout)
            if not runs(row, attempt) or (scope == "agent" and row["agent_over"]):
                raise ApiError(401, f"expired key: attempt {attempt} of {rollout} is over", "key_expired")
            if request.path_params.get("id", rollout) != rollout:
                raise ApiError(403, "this key belongs to another rollout", "wrong_rollout")
        return scope, rollout, attempt

    async def poll(self, request: Request, wait: float, found: Callable[[], list[Any]]) -> list[Any]:
        """`found()` once it finds something, or after `wait` seconds; nothing is taken for a client that has left."""
        end = time.monotonic() + wait
        while not await request.is_disconnected():
            result, left = found(), end - time.monotonic()
            if result or left <= 0:
                return result
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.bell.wait(), left)
        raise ClientDisconnect

    def ring(self) -> None:
        self.bell.set()
        self.bell = asyncio.Event()

    # ---- rollouts

    async def create(self, request: Request, /, **body: Any) -> JSON:
        group = Group(**body)
        data = orjson.dumps(group.model_dump(), option=orjson.OPT_SORT_KEYS)
        ids = [f"{group.group}.{index}" for index in range(group.n)]
        self.db.execute("INSERT OR IGNORE INTO groups VALUES(?, ?)", (group.group, data))
        if data != self.db.execute("SELECT body FROM groups WHERE name = ?", (group.group,)).fetchone()["body"]:
            raise ApiError(409, f"group {group.group!r} exists with other contents", "conflict")
        self.db.executemany('INSERT OR IGNORE INTO rollouts(id, "group", "index", kind) VALUES(?, ?, ?, ?)',
                            [(rollout, group.group, index, group.kind) for index, rollout in enumerate(ids)])
        self.ring()
        return {"group": group.group, "rollouts": ids}

    def assignment(self, row: sqlite3.Row) -> JSON:
        group, ours = orjson.loads(row["body"]), (row["id"], row["attempts"])
        return {"id": row["id"], "attempt": row["attempts"], "task": group["task"], "timeout": group["timeout"],
                **{f"{scope}_key": make_key(self.secret, scope, *ours) for scope in ("agent", "verifier")}}

    async def claim(self, request: Request, /, controller: str, max: Count = 1, wait: Seconds = 0.0) -> JSON:
        def take() -> list[JSON]:
            rows = self.rollouts("status = 'queued' ORDER BY rollouts.rowid LIMIT ?", max)
            for row in rows:
                self.set(row["id"], status="running", attempts=row["attempts"] + 1, controller=controller,
                         started_at=time.time())
            return [self.assignment(self.rollout(row["id"])) for row in rows]
        return {"rollouts": await self.poll(request, wait, take), "held_seconds": self.engine.held_seconds()}

    async def adopt(self, request: Request, /, controller: str) -> JSON:
        rows = self.rollouts("status = 'running' AND controller = ?", controller)
        return {"rollouts": [self.assignment(row) for row in rows], "held_seconds": self.engine.held_seconds()}

    async def close_calls(self, rollout: str, attempt: int) -> None:
        """The agent's key dies. Ends the attempt's open calls, and returns when their turns are logged."""
        self.set(rollout, agent_over=1)
        self.db.commit()
        tasks = [call.task for call in self.calls if call.owner == (rollout, attempt)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def agent_done(self, row: sqlite3.Row, /, attempt: int, exit_status: Int | None = None, reason: str = "",
                         output: str = "") -> None:
        if runs(row, attempt):
            self.set(row["id"], exit_status=exit_status)
            self.event(row["id"], attempt, "agent_done", {"reason": reason, "output": output[-4096:]})
            await self.close_calls(row["id"], attempt)

    async def report(self, row: sqlite3.Row, /, attempt: int, status: Literal["succeeded", "failed", "lost"],
                     reason: str = "") -> JSON:
        """How an attempt ended. Of one that does not run (any more) it changes nothing; the answer says what is."""
        if runs(row, attempt):
            await self.close_calls(row["id"], attempt)
            row = self.rollout(row["id"])  # again: this took time
        if not runs(row, attempt):
            return {"status": row["status"], "attempt": row["attempts"]}
        group, reward = orjson.loads(row["body"]), row["reward"]
        if status == "succeeded" and reward is None:
            status, reason = "failed", "verifier posted no reward"
        if status == "failed" and row["exit_status"] and row["machinery"]:
            status, reason = "lost", f"harness exited with {row['exit_status']} after: {row['machinery']}"
        self.event(row["id"], attempt, status, {"reason": reason})
        self.count(f"attempt_{status}")
        if status == "lost" and attempt < group["max_attempts"]:
            status = "queued"  # all else as it is at first
            self.db.execute('INSERT OR REPLACE INTO rollouts(rowid, id, "group", "index", kind, attempts, reason) '
                            'SELECT rowid, id, "group", "index", kind, attempts, ? FROM rollouts WHERE id = ?',
                            (reason, row["id"]))
        else:
            if status != "succeeded":
                reward = 0.0 if status == "failed" and group["on_failure"] == "zero" else None
            seq = self.db.execute("SELECT coalesce(max(seq), 0) + 1 FROM rollouts").fetchone()[0]
            self.set(row["id"], status=status, reason=reason, reward=reward, seq=seq, finished_at=time.time())
        self.branches.pop((row["id"], attempt), None)
        self.ring()
        return {"status": status, "attempt": attempt}

    async def reward(self, row: sqlite3.Row, /, reward: float, metrics: dict[str, float] = {}) -> JSON:
        if row["reward"] is None and row["status"] == "running":
            self.set(row["id"], reward=reward, metrics=orjson.dumps(metrics))
        elif row["reward"] != reward:
            raise ApiError(409, f"{row['id']} is {row['status']}, reward {row['reward']}: it takes none", "conflict")
        return {"reward": reward}

    async def events(self, row: sqlite3.Row, /, kind: str, data: Any = None) -> None:
        self.event(row["id"], row["attempts"], kind, data)

    def record(self, row: sqlite3.Row) -> JSON:
        record = dict(row)
        task = orjson.loads(record.pop("body"))["task"]
        return record | {"task_id": task["id"], "metrics": orjson.loads(row["metrics"])}

    async def get(self, row: sqlite3.Row, /) -> JSON:
        return self.record(row)

    async def select(self, request: Request, /, after: Int = -1, limit: Limit = 100) -> JSON:
        rows = self.rollouts("rollouts.rowid > ? ORDER BY rollouts.rowid LIMIT ?", after, limit)
        more = rows[-1]["rowid"] if len(rows) == limit else None
        return {"rollouts": [self.record(row) for row in rows], "next": more}

    async def finished(self, request: Request, /, after: Int = -1, limit: Limit = 100, wait: Seconds = 0.0) -> JSON:
        rows = await self.poll(request, wait, lambda: self.rollouts("seq > ? ORDER BY seq LIMIT ?", after, limit))
        seq = rows[-1]["seq"] if rows else max(after, 0)
        return {"rollouts": [self.record(row) for row in rows], "seq": seq}

    # ---- hold, state

    async def pause(self, request: Request, /, lease: Seconds) -> JSON:
        return self.engine.set_hold(True, lease, self.engine.hold["version"])

    async def lease(self, request: Request, /, lease: Seconds) -> JSON:
        if not self.engine.hold["paused"]:
            raise ApiError(409, "not paused: there is no lease to renew", "conflict")
        return await self.pause(request, lease)

    async def resume(self, request: Request, /, version: Int) -> JSON:
        return self.engine.set_hold(False, 0.0, version)

    async def state(self, request: Request, /) -> JSON:
        count = dict(self.db.execute("SELECT status, count(*) FROM rollouts GROUP BY status").fetchall())
        paused, in_flight = self.engine.hold["paused"], len(self.engine.in_flight)
        return {"paused": paused, "version": self.engine.hold["version"], "in_flight": in_flight,
                "held": len(self.calls) - in_flight if paused else 0, "held_seconds": self.engine.held_seconds(),
                "queued": count.pop("queued", 0), "running": count.pop("running", 0), "finished": sum(count.values()),
                "counts": dict(self.db.execute("SELECT name, n FROM counts ORDER BY name").fetchall())}

    async def steps(self, request: Request, /, step: Int, **rest: Any) -> None:
        self.db.execute("INSERT OR REPLACE INTO steps VALUES(?, ?)", (step, packed({"step": step, **rest})))

    async def health(self, request: Request, /) -> None:
        """For those who wait until the gateway is up."""

    # ---- conversations and turns

    def remember(self, before: bytes, messages: list[Any]) -> bytes:
        """Stores a conversation that goes on from `before`; returns the address of its end. Each message is kept once,
        however many turns and rollouts begin with the same ones."""
        for message in messages:
            data = orjson.dumps(message)
            address = hashlib.blake2b(before + data, digest_size=16).digest()
            if not self.db.execute("SELECT 1 FROM messages WHERE hash = ?", (address,)).fetchone():
                self.db.execute("INSERT INTO messages VALUES(?, ?, ?)", (address, before, zlib.compress(data, 1)))
            before = address
        return before

    def recall(self, address: bytes | None, seen: dict[bytes, tuple[bytes, Any]]) -> list[Any]:
        messages = []
        while address:
            if address not in seen:
                row = self.db.execute("SELECT before, data FROM messages WHERE hash = ?", (address,)).fetchone()
                seen[address] = (row["before"], orjson.loads(zlib.decompress(row["data"])))
            address, message = seen[address]
            messages.append(message)
        return messages[::-1]

    def sequences(self, rollout: str, attempt: int, upto: int = 2**31) -> Iterator[tuple[sqlite3.Row, bytes]]:
        """Each logged turn with its prompt and response ids."""
        whole: dict[int, bytes] = {}
        sql = 'SELECT * FROM turns WHERE rollout = ? AND attempt = ? AND "index" <= ? ORDER BY "index"'
        for turn in self.db.execute(sql, (rollout, attempt, upto)).fetchall():
            ids = whole[turn["index"]] = whole.get(turn["parent"], b"")[: 4 * turn["shared"]] + turn["ids"]
            yield turn, ids

    async def turns(self, row: sqlite3.Row, /, after: Int = -1, limit: Limit = 100, messages: bool = True) -> JSON:
        """`messages=0` leaves out what assembling rows does not need."""
        page, seen = [], {}
        for turn, ids in self.sequences(row["id"], row["attempts"], after + limit):
            if turn["index"] <= after:
                continue
            page.append({"prompt_ids": array("i", ids[: 4 * turn["prompt"]]).tolist(),
                         "response_ids": array("i", ids[4 * turn["prompt"] :]).tolist(),
                         "logprobs": None if turn["logprobs"] is None else array("d", turn["logprobs"]).tolist(),
                         "versions": orjson.loads(zlib.decompress(turn["versions"])),
                         "delivered": turn["status"] == "ok",
                         **{key: turn[key] for key in ("index", "finish_reason", "status", "error")}})
            if messages:
                said, reply = self.recall(turn["request"], seen), self.recall(turn["reply"], seen)
                tools = said.pop(0)["tools"] if "role" not in said[0] else None
                page[-1] |= {"messages": said, "tools": tools, "message": reply[-1] if reply else None}
        return {"turns": page, "next": page[-1]["index"] if len(page) == limit else None}

    def log_turn(self, call: Call, status: str, message: JSON | None = None, error: str | None = None) -> None:
        """The turn is durable when this returns. A call that sampled nothing leaves no turn; of a turn that is logged
        already only the status changes."""
        with self.db:
            if call.index is not None or not call.ids:
                sql = 'UPDATE turns SET status = ?, error = ? WHERE rollout = ? AND attempt = ? AND "index" = ?'
                self.db.execute(sql, (status, error, *call.owner, call.index))
                return
            branches = self.branches.pop(call.owner, None) or Branches()  # back again when the turn is durable
            for turn, ids in self.sequences(*call.owner) if not branches else ():
                branches.add(turn["index"], ids)
            sql = "SELECT count(*) FROM turns WHERE rollout = ? AND attempt = ?"
            index = self.db.execute(sql, call.owner).fetchone()[0]
            ids = array("i", call.prompt_ids + call.ids).tobytes()
            parent, shared = branches.add(index, ids)
            complete = len(call.logprobs) == len(call.ids) and None not in call.logprobs
            logprobs = array("d", call.logprobs).tobytes() if complete else None
            tools = [{"tools": call.body["tools"]}] if call.body.get("tools") else []
            request = self.remember(b"", tools + call.body["messages"])
            self.db.execute(f"INSERT INTO turns VALUES({','.join('?' * 16)})", (
                *call.owner, index, parent, shared, len(call.prompt_ids), ids[4 * shared :], logprobs,
                packed(call.versions), call.finish, request, self.remember(request, [message]) if message else None,
                status, error, call.started_at, time.time()))
            self.db.execute(
                "UPDATE rollouts SET turns = turns + 1, sampled_tokens = sampled_tokens + ?1, "
                "version_min = min(coalesce(version_min, ?2), ?2), version_max = max(coalesce(version_max, ?3), ?3), "
                "truncated = truncated OR ?4 WHERE id = ?5",
                (len(call.ids), min(call.versions), max(call.versions),
                 call.finish == "length" and len(call.ids) >= call.room, call.owner[0]))
        call.index, self.branches[call.owner] = index, branches

    # ---- model calls

    async def models(self, request: Request, /) -> JSON:
        card = {"object": "model", "created": 0, "owned_by": "harnessed", **await self.engine.card()}
        return {"object": "list", "data": [card]}

    async def chat(self, request: Request, /, **body: Any) -> Callable[..., Awaitable[None]]:
        owner = self.identify(request, "agent")[1:]  # again: the attempt may have ended while its body came
        most, row = self.settings.max_open_calls, self.rollout(owner[0])
        if sum(call.owner == owner for call in self.calls) >= most:
            raise ApiError(429, f"{most} calls of {row['id']} are open, the most allowed", "too_many_calls")
        body, group = dialects.chat_request(body), orjson.loads(row["body"])
        name = f"{row['id']}-{row['attempts']}-{row['calls']}"
        sampling, room = group["sampling"], group["context_limit"] or 2**31
        limits = [body.get("max_completion_tokens"), body.get("max_tokens"), sampling.pop("max_tokens"), room]
        changed = [key for key in sampling if body.get(key) not in (None, sampling[key])]
        changed += [key for key in DROPPED if body.get(key)]
        if body.get("tool_choice") not in (None, "auto", "none"):
            changed.append("tool_choice")
            body["tool_choice"] = "auto"
        self.set(row["id"], calls=row["calls"] + 1)
        for key in changed:
            self.count(f"override_{key}")
        ours = {*sampling, *DROPPED, "stream", "stream_options", "n", "max_completion_tokens"}
        chat = {key: value for key, value in body.items() if key not in ours} | {"max_tokens": 1}
        head = {"id": f"chatcmpl-{name}", "created": int(time.time()), "model": str(body.get("model") or "policy")}
        call = Call(owner, name, head, body, chat, sampling, bool(body.get("stream")), min(filter(None, limits)), room)
        return functools.partial(self.reply, call)

    async def run(self, call: Call) -> JSON:
        """One call from request to logged turn. Cancelled when its client or its attempt is gone."""
        try:
            await self.render(call)
            await self.engine.ask("/inference/v1/generate", call=call)
            completion = await self.derender(call)
            self.count("call_ok")
            self.log_turn(call, "ok", completion["choices"][0]["message"])
            return completion
        except (Exception, asyncio.CancelledError) as error:  # the boundary of one call
            failure = as_api_error(error)
            self.count(f"call_{failure.code or 'error'}")
            if failure.status >= 500:  # a harness that gives up now is lost, not failed
                self.set(call.owner[0], machinery=failure.message)
            if failure.code == "context_length_exceeded":
                self.set(call.owner[0], truncated=1)
            self.log_turn(call, "aborted" if failure.code == "aborted" else "error", error=failure.message)
            raise failure from None

    async def render(self, call: Call) -> None:
        card = await self.engine.card()
        call.chat["model"] = card["id"]
        rendered = await self.engine.ask("/v1/chat/completions/render", call.chat)
        limit = min(call.room, card.get("max_model_len") or 2**31)
        call.prompt_ids, call.room = rendered["token_ids"], limit - len(rendered["token_ids"])
        if call.room < 1:
            raise ApiError(400, f"This model's maximum context length is {limit} tokens, but the messages have "
                                f"{len(call.prompt_ids)} tokens. Shorten them.", "context_length_exceeded")
        call.max_tokens = min(call.max_tokens, call.room)
        if stops := (rendered.get("sampling_params") or {}).get("stop_token_ids"):
            call.sampling["stop_token_ids"] = stops

    async def derender(self, call: Call) -> JSON:
        # The end-of-turn token would leak into the text; with finish reason "stop" it is the last one.
        ids, message = call.ids[:-1] if call.finish == "stop" else call.ids, {}
        if ids:
            choice = {"index": 0, "token_ids": ids, "finish_reason": call.finish, "logprobs": None}
            reply = await self.engine.ask("/v1/chat/completions/derender", {
                "model": call.chat["model"], "generate_response": {"request_id": call.name, "choices": [choice]},
                "prompt_tokens": len(call.prompt_ids), "prompt_token_ids": call.prompt_ids,
                "chat_request": call.chat}, gated=False)
            message = reply["choices"][0]["message"]
        return dialects.chat_completion(call.head, message, call.finish, len(call.prompt_ids), len(call.ids))

    async def reply(self, call: Call, scope: Any, receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        """Runs the call and sends its reply, or its error; ends the call if its client leaves. An ASGI application."""
        call.task, gone, status = asyncio.create_task(self.run(call)), asyncio.create_task(receive()), 499
        self.calls.add(call)
        try:
            while not (await asyncio.wait({call.task, gone}, timeout=self.settings.keepalive,
                                          return_when=asyncio.FIRST_COMPLETED))[0]:
                if call.stream:
                    await call.send(send, dialects.chat_chunk(call.head, {"content": ""}), more=True)
            if not gone.done():
                status, body = outcome(call)
                await call.send(send, body, status)
            elif call.index is not None:
                self.log_turn(call, "aborted", error="the client left before its reply")
        finally:  # also when the server ends this task
            gone.cancel()
            call.task.cancel()
            await asyncio.gather(call.task, return_exceptions=True)
            self.calls.discard(call)
            log("call", name=call.name, turn=call.index, status=status, prompt=len(call.prompt_ids),
                sampled=len(call.ids), finish=call.finish, ms=round(1000 * (time.time() - call.started_at), 1))


def outcome(call: Call) -> tuple[int, bytes]:
    """Status and body of what is still to be sent of a call that has ended."""
    try:
        return 200, dialects.chat_reply(call.task.result(), call.body)
    except (Exception, asyncio.CancelledError) as error:
        failure = as_api_error(error)
        return failure.status, (dialects.sse if call.begun else orjson.dumps)(dialects.chat_error(failure))


# ---- the application


def as_api_error(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail)
    if isinstance(error, ValidationError):
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:5]]
        return ApiError(400, "; ".join(problems), "invalid_value")
    if isinstance(error, asyncio.CancelledError | ClientDisconnect):
        return ApiError(401, "this call was ended: its client left, or its attempt is over", "aborted")
    log("internal_error", error="".join(traceback.format_exception(error)))
    if isinstance(error, sqlite3.Error):
        return ApiError(503, f"the log cannot be written: {error}", "store_unavailable")
    return ApiError(500, f"internal error: {type(error).__name__}", "internal_error")


async def read_json(request: Request, limit: int) -> JSON:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise ApiError(413, f"the request is larger than {limit} bytes", "request_too_large")
    try:
        body = {**orjson.loads(data)}
        orjson.dumps(body)  # deeper nesting can be read than written
        return body
    except (ValueError, TypeError) as error:
        raise ApiError(400, f"the body is not a valid JSON object: {error}", "invalid_json") from None


def create_app(settings: GatewaySettings) -> Starlette:
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    g = Gateway(settings)

    def route(method: str, path: str, handler: Callable[..., Awaitable[Any]], scopes: str) -> Route:
        """`handler` gets the path's rollout, or else the request, and what was sent as its signature asks. What it
        returns is the answer; None: {"ok": true}."""
        checked = validate_call(handler, config=CHECKS | {"strict": method == "POST"})
        limit = MAX_EVENT if "verifier" in scopes else settings.max_body

        async def endpoint(request: Request) -> Any:
            started, rollout = time.monotonic(), request.path_params.get("id")
            if scopes:
                g.identify(request, scopes)
            sent = await read_json(request, limit) if method == "POST" else dict(request.query_params)
            result = await checked(g.rollout(rollout) if rollout else request, **sent)
            g.db.commit()
            if callable(result):
                return result
            if method == "POST":
                log("request", path=request.url.path, status=200, ms=round(1000 * (time.monotonic() - started), 1))
            return Response(orjson.dumps(result or {"ok": True}), media_type="application/json")
        return Route(path, endpoint, methods=[method])

    async def failed(request: Request, error: Exception) -> Response:
        g.db.rollback()
        failure = as_api_error(error)
        log("request", method=request.method, path=request.url.path[:200], status=failure.status,
            error=failure.message[:200])
        return Response(orjson.dumps(dialects.chat_error(failure)), failure.status, RETRY_AFTER.get(failure.status),
                        "application/json")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Idle sockets close before the engine's 5 s do. Proxy variables are not read: engines are near.
        pool, limits = aiohttp.TCPConnector(limit=0, keepalive_timeout=4), aiohttp.ClientTimeout(None, sock_connect=5)
        async with aiohttp.ClientSession(headers=g.engine.headers, connector=pool, timeout=limits,
                                         read_bufsize=2**20) as g.engine.http:
            yield
        g.db.close()

    both = "admin verifier"
    routes = [
        route("POST", "/v1/chat/completions", g.chat, "agent"), route("GET", "/v1/models", g.models, "agent"),
        route("POST", "/rollouts", g.create, "admin"), route("GET", "/rollouts", g.select, "admin"),
        route("POST", "/claim", g.claim, "admin"), route("POST", "/adopt", g.adopt, "admin"),
        route("POST", "/rollouts/{id}/agent_done", g.agent_done, "admin"),
        route("POST", "/rollouts/{id}/report", g.report, "admin"), route("GET", "/finished", g.finished, "admin"),
        route("GET", "/rollouts/{id}", g.get, both), route("GET", "/rollouts/{id}/turns", g.turns, both),
        route("POST", "/rollouts/{id}/reward", g.reward, both), route("POST", "/rollouts/{id}/events", g.events, both),
        route("POST", "/pause", g.pause, "admin"), route("POST", "/lease", g.lease, "admin"),
        route("POST", "/resume", g.resume, "admin"), route("POST", "/steps", g.steps, "admin"),
        route("GET", "/state", g.state, "admin"), route("GET", "/health", g.health, "")]
    kinds = (ApiError, HTTPException, ValidationError, sqlite3.Error, ClientDisconnect, Exception)
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=dict.fromkeys(kinds, failed))


def main(settings: GatewaySettings) -> None:
    if settings.die_with_parent:  # by SIGKILL, by which nothing acknowledged is lost
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    try:
        listener = socket.create_server((settings.host, settings.port), backlog=4096)
        app = create_app(settings)
    except (OSError, OverflowError, sqlite3.Error) as error:
        print(f"gateway: cannot listen on {settings.host}:{settings.port} (choose another --port?) or use "
              f"{settings.run_dir} (does another gateway use this run?): {error}", file=sys.stderr)
        raise SystemExit(2) from None
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="critical", access_log=False,
                            timeout_keep_alive=75, timeout_graceful_shutdown=1, server_header=False, date_header=False)
    log("listening", url=f"http://{settings.host}:{listener.getsockname()[1]}", run_dir=str(settings.run_dir))
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    import tyro

    main(tyro.cli(GatewaySettings))

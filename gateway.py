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
import functools
import hashlib
import hmac
import os
import re
import socket
import sqlite3
import sys
import threading
import time
import traceback
import zlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import aiohttp
import orjson
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import dialects
from config import make_key, read_secret
from dialects import ApiError

JSON = dict[str, Any]
Send = Callable[[Any], Awaitable[None]]
MAX_BRANCHES = 8  # cached token sequences of one attempt; what continues an older one is only stored less compactly
MAX_EVENT = 256 * 1024  # bytes
STREAM_ABOVE = 256  # plain calls for more tokens than this stream from the engine, so that its death loses few
STATUS_FAULT_SECONDS = 10.0  # how long an engine that answers 5xx is asked again; one that is gone: `engine_retry`
STRAGGLER_SECONDS = 5.0  # after a pause, a request that reached the engine behind the engine's own pause is taken back
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
CREATE INDEX IF NOT EXISTS rollouts_group ON rollouts("group");
CREATE TABLE IF NOT EXISTS turns(rollout TEXT, attempt INT, "index" INT, parent INT, shared INT, prompt INT, ids BLOB,
    logprobs BLOB, versions BLOB, finish_reason TEXT, request BLOB, reply BLOB, status TEXT, error TEXT,
    started_at REAL, finished_at REAL, PRIMARY KEY(rollout, attempt, "index"));
CREATE TABLE IF NOT EXISTS messages(hash BLOB PRIMARY KEY, before BLOB, data BLOB);
CREATE TABLE IF NOT EXISTS events(rollout TEXT, attempt INT, kind TEXT, data BLOB, at REAL);
CREATE TABLE IF NOT EXISTS steps(step INT PRIMARY KEY, data BLOB);
CREATE TABLE IF NOT EXISTS counts(name TEXT PRIMARY KEY, n INT);
CREATE TABLE IF NOT EXISTS hold(one INT PRIMARY KEY, data BLOB);
"""
FRESH = {"controller": None, "agent_over": 0, "exit_status": None, "machinery": None, "reward": None, "metrics": "{}",
         "truncated": 0, "turns": 0, "calls": 0, "sampled_tokens": 0, "version_min": None,
         "version_max": None}  # a rollout before its next attempt


@dataclass
class GatewaySettings:
    """Serves rollouts and the model API."""

    run_dir: Path  # Directory of this run, for the log.
    engine_url: str  # Engine that speaks vLLM's routes, e.g. http://127.0.0.1:8000
    port: int = 0  # Port to listen on. 0: a free one, which the first log line tells.
    host: str = "127.0.0.1"  # Address to listen on.
    secret_file: Path | None = None  # What all keys are made from. None: RUN_DIR/secret, made if missing.
    engine_key_file: Path | None = None  # File with the engine's bearer key.
    engine_retry: float = 60.0  # Seconds for which a call waits for an engine that is gone before it gets 503.
    max_open_calls: int = 64  # Open model calls of one rollout; more get 429.
    max_body: int = 64 * 2**20  # Bytes of one request; more get 413.
    keepalive: float = 15.0  # Seconds of silence after which a waiting stream gets an empty event.
    die_with_parent: bool = False  # End when the process that started this one ends.


# ---- what clients send, checked

Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Sampling(Body, extra="forbid"):
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


class Task(Body, extra="allow"):
    id: str
    agent: JSON = {}
    verifier: JSON = {}


class Group(Body, extra="forbid"):
    group: str = Field(pattern=r"^[A-Za-z0-9_.]{1,72}$")
    n: int = Field(ge=1, le=4096)
    task: Task
    kind: Literal["train", "eval"] = "train"
    sampling: Sampling = Sampling()
    timeout: float = Field(600.0, gt=0)
    max_attempts: Count = 3
    on_failure: Literal["zero", "drop"] = "zero"
    context_limit: Count | None = None


class Claim(Body):
    controller: str
    max: Count = 1
    wait: float = Field(0.0, ge=0, le=3600)


class AgentDone(Body):
    attempt: int
    exit_status: Int | None = None
    reason: str = ""
    output: str = ""


class Report(Body):
    attempt: int
    status: Literal["succeeded", "failed", "lost"]
    reason: str = ""


class Reward(Body):
    reward: float
    metrics: dict[str, float] = {}


class Event(Body):
    kind: str
    data: Any = None


class Lease(Body):
    lease: float = Field(ge=0, le=1e6)


class Resume(Body):
    version: Int


class Step(Body, extra="allow"):
    step: Int


class Query(BaseModel):
    """The query string of any GET. `messages=0` leaves out of turns what assembling rows does not need."""

    after: Int = -1
    limit: int = Field(100, ge=1, le=1000)
    wait: float = Field(0.0, ge=0, le=3600)
    status: str | None = None
    group: str | None = None
    kind: str | None = None
    messages: bool = True


# ---- errors, keys, ids


class EngineFault(Exception):
    """The engine answered, but not with a result."""


class Identity(NamedTuple):
    scope: str
    rollout: str
    attempt: int


def check_key(secret: str, key: str) -> Identity | None:
    scope, rollout, attempt, *_ = [*key.split("-"), "", "", ""]
    who = Identity(scope, rollout, int(attempt) if re.fullmatch(r"[0-9]{1,9}", attempt) else 0)
    return who if hmac.compare_digest(make_key(secret, *who).encode(), key.encode()) else None


def log(event: str, **fields: Any) -> None:
    with contextlib.suppress(OSError):  # a parent that stopped reading must not stop calls
        os.write(2, orjson.dumps({"at": round(time.time(), 3), "event": event, **fields}) + b"\n")


def packed(data: Any) -> bytes:
    return zlib.compress(orjson.dumps(data), 1)


def common_ids(a: bytes, b: bytes) -> int:
    """Number of leading int32 ids that two sequences share."""
    low, high = 0, min(len(a), len(b)) // 4
    if a[: 4 * high] == b[: 4 * high]:
        return high
    while high - low > 1:  # a[:low] is shared, a[:high] is not
        middle = (low + high) // 2
        low, high = (middle, high) if a[4 * low : 4 * middle] == b[4 * low : 4 * middle] else (low, middle)
    return low


class Branches(dict[int, bytes]):
    """The token sequences of an attempt that no later turn continues, by turn."""

    def closest(self, ids: bytes) -> tuple[int, int]:
        """The turn with the longest common beginning (-1: none), and that beginning's length in ids."""
        shared, index = max(((common_ids(branch, ids), index) for index, branch in self.items()), default=(0, -1))
        return (index, shared) if shared else (-1, 0)

    def grow(self, index: int, ids: bytes, parent: int, shared: int) -> None:
        if len(self.get(parent, b"")) == 4 * shared or len(self) >= MAX_BRANCHES:
            self.pop(parent if parent in self else next(iter(self), -1), None)
        self[index] = ids


@dataclass(eq=False)
class Call:
    """One model call and all that is known of its tokens. It outlives no connection, so far."""

    rollout: str
    attempt: int
    name: str
    body: JSON  # the harness's request
    sampling: JSON
    max_tokens: int
    room: int  # tokens that the context has; once the prompt is known, what it has left
    model: str = ""  # the engine's name for it
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)  # None: the engine gave none for some id
    versions: list[int] = field(default_factory=list)
    part: int = 0  # where the current engine request began in `ids`
    finish: str = ""
    started_at: float = field(default_factory=time.time)
    index: int | None = None  # of the logged turn
    task: "asyncio.Task[JSON] | None" = None
    begun: bool = False  # some of the reply's stream is sent

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def head(self) -> JSON:
        """What a completion and each chunk of its stream begin with."""
        model = str(self.body.get("model") or self.model)
        return {"id": f"chatcmpl-{self.name}", "created": int(self.started_at), "model": model}

    def continuation(self) -> JSON:
        """The engine request that goes on from the prompt and the ids kept so far."""
        self.part, self.finish = len(self.ids), ""
        sampling = {key: value for key, value in self.sampling.items() if value is not None}
        if "seed" in sampling:
            sampling["seed"] += self.part
        return {"model": self.model, "token_ids": self.prompt_ids + self.ids,
                "stream": self.stream or self.max_tokens > STREAM_ABOVE,
                "sampling_params": {**sampling, "max_tokens": self.max_tokens - self.part, "logprobs": 0}}

    async def receive(self, response: aiohttp.ClientResponse, version: int) -> None:
        """Keeps what the engine sampled. `version`: of the weights, where the engine does not say."""
        if response.content_type != "text/event-stream":
            return self.keep(orjson.loads(await response.read())["choices"][0], version)
        rest = b""
        async for piece in response.content.iter_any():
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                if event != b"data: [DONE]":
                    self.keep(orjson.loads(event.removeprefix(b"data: "))["choices"][0], version)

    def keep(self, choice: JSON, version: int) -> None:
        ids = choice.get("token_ids") or []
        numbers = [item.get("logprob") for item in (choice.get("logprobs") or {}).get("content") or ()]
        if self.logprobs is not None and len(numbers) == len(ids) and None not in numbers:
            self.logprobs += numbers
        else:
            self.logprobs = None
        self.ids += ids
        self.versions += [version] * len(ids)
        for span in choice.get("weight_versions") or ():
            if str(span["version"]).isdigit():
                start, end = self.part + span["start"], min(self.part + span["end"], len(self.ids))
                self.versions[start:end] = [int(span["version"])] * (end - start)
        self.finish = choice.get("finish_reason") or self.finish


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
        self.held = 0  # calls that wait at the gate
        self.resumed = asyncio.Event()  # replaced when set

    def held_seconds(self) -> float:
        """Seconds in which calls were held, ever. An expired lease holds nothing."""
        end = min(time.time(), self.hold["lease_until"])
        return self.hold["before"] + (max(0.0, end - self.hold["since"]) if self.hold["paused"] else 0.0)

    def set_hold(self, paused: bool, lease: float, version: int) -> JSON:
        now, before = time.time(), self.held_seconds()
        hold = {"paused": paused, "version": version, "lease_until": now + lease, "since": now, "before": before}
        self.db.execute("INSERT OR REPLACE INTO hold VALUES(1, ?)", (orjson.dumps(hold),))
        self.db.commit()
        if paused and not self.hold["paused"]:
            asyncio.get_running_loop().call_later(STRAGGLER_SECONDS, self.take_back, self.resumed)
        self.hold = hold
        if not paused:
            self.resumed.set()
            self.resumed = asyncio.Event()
        return {"in_flight": len(self.in_flight), "version": version}

    def take_back(self, resumed: asyncio.Event) -> None:
        """Takes back requests that wait inside a paused engine: it may sleep only once nothing is in flight."""
        for limit in self.in_flight if not resumed.is_set() else ():
            if not limit.expired():
                limit.reschedule(0)

    async def gate(self) -> bool:
        """Returns when not paused: whether it waited. If not, it gave no way: what follows at once is not paused."""
        waited = False
        while self.hold["paused"]:
            left, waited = self.hold["lease_until"] - time.time(), True
            if left <= 0:
                raise ApiError(503, "the trainer's pause has expired: it died or hangs; retry later", "pause_expired")
            self.held += 1
            try:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.resumed.wait(), left)
            finally:
                self.held -= 1
        return waited

    async def card(self) -> JSON:
        """The engine's model: {"id", "max_model_len"?, ...}."""
        self.model = self.model or (await self.ask("/v1/models"))["data"][0]
        return self.model

    async def ask(self, path: str, body: JSON | None = None, gated: bool = True, call: Call | None = None) -> Any:
        """The JSON of the first answer that is a result. A `call` receives its answer itself; each try continues it.
        A try that brought tokens, or was held, starts the patience anew. ApiError: 400 the engine's, 503 no engine."""
        tries, since, kept = 0, 0.0, 0
        while True:
            if (gated or tries) and await self.gate():
                tries = 0
            limit = asyncio.timeout(None)
            self.in_flight.add(limit)
            try:
                data = orjson.dumps(call.continuation() if call else body) if call or body else None
                async with limit, self.http.request("POST" if data else "GET", self.url + path, data=data) as response:
                    if response.status in (400, 413, 422):
                        raise refusal(await response.read())
                    if response.status != 200:
                        raise EngineFault(f"{response.status} {(await response.text('utf-8', 'replace'))[:300]}")
                    if not call:
                        return orjson.loads(await response.read())
                    await call.receive(response, self.hold["version"])
                    if call.finish:
                        return None
                    raise EngineFault("the reply ended without a finish reason")
            except (aiohttp.ClientError, OSError, EngineFault, ValueError, LookupError, TypeError) as error:
                fault = error  # the last three: the answer is not of the agreed shape
            finally:
                self.in_flight.discard(limit)
            self.model = None  # another engine may come up in its place
            if not tries or (call and len(call.ids) > kept):
                tries, since, kept = 0, time.monotonic(), len(call.ids) if call else 0
            gone = isinstance(fault, aiohttp.ClientError | OSError)
            if time.monotonic() - since >= (self.patience if gone else min(self.patience, STATUS_FAULT_SECONDS)):
                raise ApiError(503, f"engine {self.url}{path} kept failing: {fault!r}", "engine_unavailable")
            if tries == 1:
                log("engine_retry", path=path, error=repr(fault))
            await asyncio.sleep(min(1.0, 0.05 * 2**tries) if tries else 0)  # at first at once: a stale idle socket
            tries += 1


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
        self.open: dict[tuple[str, int], set[Call]] = {}

    def count(self, name: str) -> None:
        self.db.execute("INSERT INTO counts VALUES(?, 1) ON CONFLICT(name) DO UPDATE SET n = n + 1", (name,))

    def event(self, rollout: str, attempt: int, kind: str, data: Any) -> None:
        self.db.execute("INSERT INTO events VALUES(?, ?, ?, ?, ?)", (rollout, attempt, kind, packed(data), time.time()))

    def set(self, rollout: str, **columns: Any) -> None:
        assignments = ", ".join(f"{column} = ?" for column in columns)
        self.db.execute(f"UPDATE rollouts SET {assignments} WHERE id = ?", (*columns.values(), rollout))

    def rollouts(self, where: str, *values: Any) -> list[sqlite3.Row]:
        sql = f'SELECT rollouts.rowid, * FROM rollouts JOIN groups ON "group" = name WHERE {where}'
        return self.db.execute(sql, values).fetchall()

    def rollout(self, rollout: str) -> sqlite3.Row:
        if not (rows := self.rollouts("id = ?", rollout)):
            raise ApiError(404, f"no rollout {rollout[:100]!r}", "not_found")
        return rows[0]

    # ---- requests

    def identify(self, request: Request, scopes: str) -> Identity:
        header = request.headers.get("authorization", "")
        key = header[7:] if header[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        who = check_key(self.secret, key)
        if who is None:
            raise ApiError(401, "missing or wrong key: send this rollout's key as bearer token", "invalid_api_key")
        if who.scope not in scopes.split():
            raise ApiError(403, f"a key of scope {who.scope!r} may not call this route", "wrong_scope")
        if who.scope != "admin":
            row = self.rollout(who.rollout)
            alive = row["status"] == "running" and row["attempts"] == who.attempt
            if not alive or (who.scope == "agent" and row["agent_over"]):
                raise ApiError(401, f"expired key: attempt {who.attempt} of {who.rollout} is over", "key_expired")
            if request.path_params.get("id", who.rollout) != who.rollout:
                raise ApiError(403, "this key belongs to another rollout", "wrong_rollout")
        return who

    async def body(self, request: Request, limit: int) -> JSON:
        size, pieces = 0, []
        if int(request.headers.get("content-length", "0")) <= limit:
            async for piece in request.stream():
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    break
        if not pieces or size > limit:
            raise ApiError(413, f"the request is larger than {limit} bytes", "request_too_large")
        try:
            data = orjson.loads(b"".join(pieces))
            orjson.dumps(data)  # deeper nesting can be read than written
        except (ValueError, TypeError) as error:
            raise ApiError(400, f"the body is not valid JSON: {error}", "invalid_json") from None
        if not isinstance(data, dict):
            raise ApiError(400, "the body must be a JSON object", "invalid_json")
        return data

    async def poll(self, request: Request, wait: float, found: Callable[[], list[Any]]) -> list[Any]:
        """`found()` once it finds something, or after `wait` seconds; nothing is taken for a client that has left."""
        end = time.monotonic() + wait
        while not await request.is_disconnected():
            result, left = found(), end - time.monotonic()
            if result or left <= 0:
                return result
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.bell.wait(), min(left, 5.0))
        raise ClientDisconnect

    def ring(self) -> None:
        self.bell.set()
        self.bell = asyncio.Event()

    # ---- rollouts

    async def create(self, request: Request, body: Group) -> JSON:
        data = orjson.dumps(body.model_dump(), option=orjson.OPT_SORT_KEYS)
        ids = [f"{body.group}.{index}" for index in range(body.n)]
        known = self.db.execute("SELECT body FROM groups WHERE name = ?", (body.group,)).fetchone()
        if known and known["body"] != data:
            raise ApiError(409, f"group {body.group!r} exists with other contents", "conflict")
        if not known:
            self.db.execute("INSERT INTO groups VALUES(?, ?)", (body.group, data))
            self.db.executemany('INSERT INTO rollouts(id, "group", "index", kind) VALUES(?, ?, ?, ?)',
                                [(rollout, body.group, index, body.kind) for index, rollout in enumerate(ids)])
            self.ring()
        return {"group": body.group, "rollouts": ids}

    def assignment(self, row: sqlite3.Row) -> JSON:
        group, ours = orjson.loads(row["body"]), (row["id"], row["attempts"])
        return {"id": row["id"], "attempt": row["attempts"], "task": group["task"], "timeout": group["timeout"],
                "agent_over": bool(row["agent_over"]), "agent_key": make_key(self.secret, "agent", *ours),
                "verifier_key": make_key(self.secret, "verifier", *ours)}

    async def claim(self, request: Request, body: Claim) -> JSON:
        def take() -> list[JSON]:
            rows = self.rollouts("status = 'queued' ORDER BY rollouts.rowid LIMIT ?", body.max)
            for row in rows:
                self.set(row["id"], status="running", attempts=row["attempts"] + 1, controller=body.controller,
                         started_at=time.time())
            return [self.assignment(self.rollout(row["id"])) for row in rows]
        return {"rollouts": await self.poll(request, body.wait, take), "held_seconds": self.engine.held_seconds()}

    async def adopt(self, request: Request, body: Claim) -> JSON:
        rows = self.rollouts("status = 'running' AND controller = ?", body.controller)
        return {"rollouts": [self.assignment(row) for row in rows], "held_seconds": self.engine.held_seconds()}

    async def close_calls(self, rollout: str, attempt: int) -> None:
        """The agent's key dies. Ends the attempt's open calls, and returns when their turns are logged."""
        self.set(rollout, agent_over=1)
        self.db.commit()
        if tasks := [call.task for call in self.open.get((rollout, attempt), ()) if call.task]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def current(self, request: Request, attempt: int) -> sqlite3.Row:
        """The rollout, if `attempt` is the one that runs: late reports change nothing."""
        row = self.rollout(request.path_params["id"])
        if attempt != row["attempts"] or row["status"] != "running":
            raise ApiError(409, f"attempt {attempt} of {row['id']} is over: it is {row['status']} in attempt "
                                f"{row['attempts']}", "stale_attempt")
        return row

    async def agent_done(self, request: Request, body: AgentDone) -> JSON:
        row = self.current(request, body.attempt)
        self.set(row["id"], exit_status=body.exit_status)
        self.event(row["id"], body.attempt, "agent_done", {"reason": body.reason, "output": body.output[-4096:]})
        await self.close_calls(row["id"], body.attempt)
        return {"ok": True}

    async def report(self, request: Request, body: Report) -> JSON:
        row = self.rollout(request.path_params["id"])
        if body.attempt == row["attempts"] and row["seq"] is not None:
            return {"status": row["status"], "attempt": row["attempts"]}  # its reply was lost: the same again
        await self.close_calls(self.current(request, body.attempt)["id"], body.attempt)
        row = self.current(request, body.attempt)  # again: this took time
        status, reason = body.status, body.reason
        if status == "succeeded" and row["reward"] is None:
            status, reason = "failed", "verifier posted no reward"
        if status == "failed" and row["exit_status"] and row["machinery"]:
            status, reason = "lost", f"harness exited with {row['exit_status']} after: {row['machinery']}"
        self.event(row["id"], body.attempt, status, {"reason": reason})
        self.count(f"attempt_{status}")
        if status == "lost" and body.attempt < orjson.loads(row["body"])["max_attempts"]:
            status = "queued"
            self.set(row["id"], status=status, reason=reason, **FRESH)
        else:
            seq = self.db.execute("SELECT coalesce(max(seq), 0) + 1 FROM rollouts").fetchone()[0]
            self.set(row["id"], status=status, reason=reason, seq=seq, finished_at=time.time())
        self.branches.pop((row["id"], body.attempt), None)
        self.ring()
        return {"status": status, "attempt": body.attempt}

    async def reward(self, request: Request, body: Reward) -> JSON:
        row = self.rollout(request.path_params["id"])
        if row["reward"] is None and row["status"] == "running":
            self.set(row["id"], reward=body.reward, metrics=orjson.dumps(body.metrics))
        elif row["reward"] != body.reward:
            raise ApiError(409, f"{row['id']} is {row['status']}, reward {row['reward']}: it takes none", "conflict")
        return {"reward": body.reward}

    async def events(self, request: Request, body: Event) -> JSON:
        row = self.rollout(request.path_params["id"])
        self.event(row["id"], row["attempts"], body.kind, body.data)
        return {"ok": True}

    def record(self, row: sqlite3.Row) -> JSON:
        record, group = dict(row), orjson.loads(row["body"])
        del record["body"], record["name"]
        if row["status"] in ("failed", "lost"):
            record["reward"] = 0.0 if row["status"] == "failed" and group["on_failure"] == "zero" else None
        return record | {"task_id": group["task"]["id"], "metrics": orjson.loads(row["metrics"]),
                         "truncated": bool(row["truncated"])}

    async def get(self, request: Request, query: Query) -> JSON:
        return self.record(self.rollout(request.path_params["id"]))

    async def select(self, request: Request, query: Query) -> JSON:
        wanted = query.model_dump(include={"status", "group", "kind"}, exclude_none=True)
        where = " AND ".join(["rollouts.rowid > ?", *(f'"{column}" = ?' for column in wanted)])
        rows = self.rollouts(f"{where} ORDER BY rollouts.rowid LIMIT ?", query.after, *wanted.values(), query.limit)
        more = rows[-1]["rowid"] if len(rows) == query.limit else None
        return {"rollouts": [self.record(row) for row in rows], "next": more}

    async def finished(self, request: Request, query: Query) -> JSON:
        rows = await self.poll(request, query.wait, lambda: self.rollouts(
            "seq > ? ORDER BY seq LIMIT ?", query.after, query.limit))
        seq = rows[-1]["seq"] if rows else max(query.after, 0)
        return {"rollouts": [self.record(row) for row in rows], "seq": seq}

    # ---- hold, state

    async def pause(self, request: Request, body: Lease) -> JSON:
        return self.engine.set_hold(True, body.lease, self.engine.hold["version"])

    async def lease(self, request: Request, body: Lease) -> JSON:
        if not self.engine.hold["paused"]:
            raise ApiError(409, "not paused: there is no lease to renew", "conflict")
        return await self.pause(request, body)

    async def resume(self, request: Request, body: Resume) -> JSON:
        return self.engine.set_hold(False, 0.0, body.version)

    async def state(self, request: Request, query: Query) -> JSON:
        count = dict(self.db.execute("SELECT status, count(*) FROM rollouts GROUP BY status").fetchall())
        return {"paused": self.engine.hold["paused"], "version": self.engine.hold["version"], "held": self.engine.held,
                "in_flight": len(self.engine.in_flight), "held_seconds": self.engine.held_seconds(),
                "queued": count.pop("queued", 0), "running": count.pop("running", 0), "finished": sum(count.values()),
                "counts": dict(self.db.execute("SELECT name, n FROM counts ORDER BY name").fetchall())}

    async def steps(self, request: Request, body: Step) -> JSON:
        self.db.execute("INSERT OR REPLACE INTO steps VALUES(?, ?)", (body.step, packed(body.model_dump())))
        return {"ok": True}

    async def health(self, request: Request, query: Query) -> JSON:
        return {"ok": True}

    # ---- conversations and turns

    def remember(self, before: bytes, messages: list[Any]) -> bytes:
        """Stores a conversation that goes on from `before`; returns the address of its end. Each message is kept once,
        however many turns and rollouts begin with the same ones."""
        nodes = []
        for message in messages:
            data = orjson.dumps(message)
            nodes.append((hashlib.blake2b(before + data, digest_size=16).digest(), before, data))
            before = nodes[-1][0]
        for address, parent, data in reversed(nodes):
            if self.db.execute("SELECT 1 FROM messages WHERE hash = ?", (address,)).fetchone():
                break  # then everything before it is there too
            self.db.execute("INSERT INTO messages VALUES(?, ?, ?)", (address, parent, zlib.compress(data, 1)))
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

    async def turns(self, request: Request, query: Query) -> JSON:
        row, page = self.rollout(request.path_params["id"]), []
        seen: dict[bytes, tuple[bytes, Any]] = {}
        for turn, ids in self.sequences(row["id"], row["attempts"], query.after + query.limit):
            if turn["index"] <= query.after:
                continue
            page.append({"prompt_ids": array("i", ids[: 4 * turn["prompt"]]).tolist(),
                         "response_ids": array("i", ids[4 * turn["prompt"] :]).tolist(),
                         "logprobs": None if turn["logprobs"] is None else array("d", turn["logprobs"]).tolist(),
                         "versions": orjson.loads(zlib.decompress(turn["versions"])),
                         "delivered": turn["status"] == "ok",
                         **{key: turn[key] for key in ("index", "finish_reason", "status", "error")}})
            if query.messages:
                messages, reply = self.recall(turn["request"], seen), self.recall(turn["reply"], seen)
                tools = messages.pop(0)["tools"] if "role" not in messages[0] else None
                page[-1] |= {"messages": messages, "tools": tools, "message": reply[-1] if reply else None}
        return {"turns": page, "next": page[-1]["index"] if len(page) == query.limit else None}

    def log_turn(self, call: Call, status: str, message: JSON | None = None, error: str | None = None) -> None:
        """The turn is durable when this returns. A call that sampled nothing leaves no turn; of a turn that is logged
        already only the status changes."""
        key = (call.rollout, call.attempt)
        with self.db:
            self.count(f"call_{status}")
            if call.index is not None or not call.ids:
                sql = 'UPDATE turns SET status = ?, error = ? WHERE rollout = ? AND attempt = ? AND "index" = ?'
                self.db.execute(sql, (status, error, *key, call.index))
                return
            branches = self.branches.get(key) or Branches()
            for turn, ids in self.sequences(*key) if not branches else ():
                branches.grow(turn["index"], ids, turn["parent"], turn["shared"])
            index = self.db.execute("SELECT count(*) FROM turns WHERE rollout = ? AND attempt = ?", key).fetchone()[0]
            ids = array("i", call.prompt_ids + call.ids).tobytes()
            parent, shared = branches.closest(ids)
            logprobs = None if call.logprobs is None else array("d", call.logprobs).tobytes()
            if logprobs is None:
                self.count("turn_without_logprobs")
            tools = [{"tools": call.body["tools"]}] if call.body.get("tools") else []
            request = self.remember(b"", tools + call.body["messages"])
            self.db.execute(f"INSERT INTO turns VALUES({','.join('?' * 16)})", (
                *key, index, parent, shared, len(call.prompt_ids), ids[4 * shared :], logprobs, packed(call.versions),
                call.finish, request, self.remember(request, [message]) if message else None, status, error,
                call.started_at, time.time()))
            self.db.execute(
                "UPDATE rollouts SET turns = turns + 1, sampled_tokens = sampled_tokens + :sampled, "
                "version_min = min(coalesce(version_min, :oldest), :oldest), "
                "version_max = max(coalesce(version_max, :newest), :newest), truncated = truncated OR :full "
                "WHERE id = :id",
                {"id": call.rollout, "sampled": len(call.ids), "oldest": min(call.versions),
                 "newest": max(call.versions), "full": call.finish == "length" and len(call.ids) >= call.room})
        call.index = index
        branches.grow(index, ids, parent, shared)
        self.branches[key] = branches

    # ---- model calls

    async def models(self, request: Request, query: Query) -> JSON:
        card = {"object": "model", "created": 0, "owned_by": "harnessed", **await self.engine.card()}
        return {"object": "list", "data": [card]}

    async def chat(self, request: Request) -> Callable[..., Awaitable[None]]:
        self.identify(request, "agent")
        body = await self.body(request, self.settings.max_body)
        who = self.identify(request, "agent")  # again: the attempt may have ended while its body came
        if len(self.open.get(who[1:], ())) >= self.settings.max_open_calls:
            raise ApiError(429, f"{self.settings.max_open_calls} calls of {who.rollout} are open, the most allowed",
                           "too_many_calls")
        body = dialects.chat_request(body)
        row = self.rollout(who.rollout)
        group, name = orjson.loads(row["body"]), f"{who.rollout}-{who.attempt}-{row['calls']}"
        sampling, room = group["sampling"], group["context_limit"] or 2**31
        limits = [body.get("max_completion_tokens"), body.get("max_tokens"), sampling.pop("max_tokens"), room]
        if sampling["seed"] is not None:  # its own for each call, or a group would be n equal rollouts
            sampling["seed"] = zlib.crc32(f"{sampling['seed']}/{name}".encode())
        changed = [key for key in sampling if body.get(key) not in (None, sampling[key])]
        changed += [key for key in DROPPED if body.get(key)]
        if body.get("tool_choice") not in (None, "auto", "none"):
            changed.append("tool_choice")
            body["tool_choice"] = "auto"
        self.set(who.rollout, calls=row["calls"] + 1)
        for key in changed:
            self.count(f"override_{key}")
        self.db.commit()
        return functools.partial(self.reply, Call(*who[1:], name, body, sampling, min(filter(None, limits)), room))

    async def run(self, call: Call) -> JSON:
        """One call from request to logged turn. Cancelled when its client or its attempt is gone."""
        try:
            await self.render(call)
            while not call.finish:
                await self.engine.ask("/inference/v1/generate", call=call)
                if call.finish == "abort":
                    call.finish = "" if len(call.ids) < call.max_tokens else "length"
                    self.count("generation_continued")
                    self.db.commit()
                    await asyncio.sleep(0.02)  # an engine that someone else paused: do not spin
            completion = await self.derender(call)
            self.log_turn(call, "ok", completion["choices"][0]["message"])
            return completion
        except asyncio.CancelledError:
            self.log_turn(call, "aborted", error="the client left, or the attempt ended")
            raise
        except ApiError as error:
            self.log_turn(call, "error", error=error.message)
            if error.status >= 500:  # a harness that gives up now is lost, not failed
                self.set(call.rollout, machinery=error.message)
            if error.code:
                self.count(f"call_{error.code}")
            if error.code == "context_length_exceeded":
                self.set(call.rollout, truncated=1)
            self.db.commit()
            raise

    async def render(self, call: Call) -> None:
        card = await self.engine.card()
        ours = {*call.sampling, *DROPPED, "stream", "stream_options", "n", "max_completion_tokens"}
        body = {key: value for key, value in call.body.items() if key not in ours}
        rendered = await self.engine.ask("/v1/chat/completions/render", {**body, "model": card["id"], "max_tokens": 1})
        limit = min(call.room, card.get("max_model_len") or 2**31)
        call.prompt_ids, call.model = rendered["token_ids"], card["id"]
        call.room = limit - len(call.prompt_ids)
        if call.room < 1:
            raise ApiError(400, f"This model's maximum context length is {limit} tokens, but the messages have "
                                f"{len(call.prompt_ids)} tokens. Shorten them.", "context_length_exceeded")
        call.max_tokens = min(call.max_tokens, call.room)
        if stops := (rendered.get("sampling_params") or {}).get("stop_token_ids"):
            call.sampling["stop_token_ids"] = stops

    async def derender(self, call: Call) -> JSON:
        # The end-of-turn token would leak into the text; with finish reason "stop" it is the last one.
        ids, message = call.ids[:-1] if call.finish == "stop" else call.ids, {"content": ""}
        if ids:
            choice = {"index": 0, "token_ids": ids, "finish_reason": call.finish, "logprobs": None}
            ours = ("stream", "stream_options", "n", *DROPPED)
            chat = {key: value for key, value in call.body.items() if key not in ours}
            reply = await self.engine.ask("/v1/chat/completions/derender", {
                "model": call.model, "generate_response": {"request_id": call.name, "choices": [choice]},
                "prompt_tokens": len(call.prompt_ids), "prompt_token_ids": call.prompt_ids,
                "chat_request": {**chat, "model": call.model}}, gated=False)
            message = {key: value for key, value in reply["choices"][0]["message"].items() if value not in (None, [])}
        finish = "tool_calls" if message.get("tool_calls") and call.finish == "stop" else call.finish
        prompt, sampled = len(call.prompt_ids), len(call.ids)
        choice = {"index": 0, "logprobs": None, "finish_reason": finish,
                  "message": {"role": "assistant", "content": None, **message}}
        return {**call.head, "object": "chat.completion", "choices": [choice], "usage": {
            "prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}}

    async def reply(self, call: Call, scope: Any, receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        """Runs the call and sends its reply, or its error; ends the call if its client leaves. An ASGI application."""
        status, calls = 499, self.open.setdefault((call.rollout, call.attempt), set())
        calls.add(call)
        call.task, gone = asyncio.ensure_future(self.run(call)), asyncio.ensure_future(receive())
        both = {call.task, gone}
        try:
            while not (call.task.done() or gone.done()):
                await asyncio.wait(both, timeout=self.settings.keepalive, return_when=asyncio.FIRST_COMPLETED)
                if call.stream and not (call.task.done() or gone.done()):
                    await send_event(call, send, dialects.chat_chunk(call.head, {"content": ""}))
            if not gone.done():
                status = await send_result(call, scope, receive, send)
            elif call.index is not None:
                self.log_turn(call, "aborted", error="the client left before its reply")
        finally:  # also when the server ends this task
            gone.cancel()
            call.task.cancel()
            await asyncio.wait({call.task})
            calls.discard(call)
            if not calls:
                self.open.pop((call.rollout, call.attempt), None)
            log("call", name=call.name, turn=call.index, status=status, prompt=len(call.prompt_ids),
                sampled=len(call.ids), finish=call.finish, ms=round(1000 * (time.time() - call.started_at), 1))


async def send_event(call: Call, send: Send, body: bytes, more: bool = True) -> None:
    if not call.begun:
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = dialects.chat_chunk(call.head, {"role": "assistant", "content": ""}) + body
    call.begun = True
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_result(call: Call, scope: Any, receive: Callable[[], Awaitable[Any]], send: Send) -> int:
    try:
        completion = call.task.result()
    except BaseException as error:  # boundary: one call
        failure = as_api_error(error)
        if call.begun:
            await send_event(call, send, dialects.sse(dialects.chat_error(failure)), more=False)
        else:
            await error_response(failure)(scope, receive, send)
        return failure.status
    if call.stream:
        usage = bool((call.body.get("stream_options") or {}).get("include_usage"))
        await send_event(call, send, b"".join(dialects.chat_stream(completion, usage)), more=False)
    else:
        await Response(orjson.dumps(completion), media_type="application/json")(scope, receive, send)
    return 200


# ---- the application


def as_api_error(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail)
    if isinstance(error, ValidationError):
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:5]]
        return ApiError(400, "; ".join(problems), "invalid_value")
    if isinstance(error, asyncio.CancelledError):
        return ApiError(401, "this key has expired: its attempt is over", "key_expired")
    log("internal_error", error="".join(traceback.format_exception(error)))
    if isinstance(error, sqlite3.Error):
        return ApiError(503, f"the log cannot be written: {error}", "store_unavailable")
    return ApiError(500, f"internal error: {type(error).__name__}", "internal_error")


def error_response(error: ApiError) -> Response:
    headers = {429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}.get(error.status)
    return Response(orjson.dumps(dialects.chat_error(error)), error.status, headers, "application/json")


def create_app(settings: GatewaySettings) -> Starlette:
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    gateway = g = Gateway(settings)

    def route(method: str, path: str, handler: Callable[..., Awaitable[JSON]], scopes: str,
              model: type[BaseModel] = Query) -> Route:
        async def endpoint(request: Request) -> Response:
            started, given = time.monotonic(), dict(request.query_params)
            if scopes:
                gateway.identify(request, scopes)
            if method == "POST":
                given = await gateway.body(request, MAX_EVENT if model is Event else settings.max_body)
            result = await handler(request, model.model_validate(given))
            gateway.db.commit()
            if method == "POST":
                log("request", path=request.url.path, status=200, ms=round(1000 * (time.monotonic() - started), 1))
            return Response(orjson.dumps(result), media_type="application/json")
        return Route(path, endpoint, methods=[method])

    async def failed(request: Request, error: Exception) -> Response:
        gateway.db.rollback()
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)
        failure = as_api_error(error)
        log("request", method=request.method, path=request.url.path[:200], status=failure.status,
            error=failure.message[:200])
        return error_response(failure)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        # Idle sockets close before the engine's 5 s do. Proxy variables are not read: engines are near.
        pool, limits = aiohttp.TCPConnector(limit=0, keepalive_timeout=4), aiohttp.ClientTimeout(None, sock_connect=5)
        async with aiohttp.ClientSession(headers=g.engine.headers, connector=pool, timeout=limits) as g.engine.http:
            yield
        gateway.db.close()

    both = "admin verifier"
    routes = [
        Route("/v1/chat/completions", g.chat, methods=["POST"]), route("GET", "/v1/models", g.models, "agent"),
        route("POST", "/rollouts", g.create, "admin", Group), route("GET", "/rollouts", g.select, "admin"),
        route("POST", "/claim", g.claim, "admin", Claim), route("POST", "/adopt", g.adopt, "admin", Claim),
        route("GET", "/finished", g.finished, "admin"), route("GET", "/state", g.state, "admin"),
        route("POST", "/pause", g.pause, "admin", Lease), route("POST", "/lease", g.lease, "admin", Lease),
        route("POST", "/resume", g.resume, "admin", Resume), route("POST", "/steps", g.steps, "admin", Step),
        route("GET", "/rollouts/{id}", g.get, both), route("GET", "/rollouts/{id}/turns", g.turns, both),
        route("POST", "/rollouts/{id}/reward", g.reward, both, Reward),
        route("POST", "/rollouts/{id}/events", g.events, both, Event),
        route("POST", "/rollouts/{id}/agent_done", g.agent_done, "admin", AgentDone),
        route("POST", "/rollouts/{id}/report", g.report, "admin", Report), route("GET", "/health", g.health, "")]
    kinds = (ApiError, HTTPException, ValidationError, sqlite3.Error, ClientDisconnect, Exception)
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=dict.fromkeys(kinds, failed))
    app.state.gateway = gateway
    return app


def die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)  # as good as kill -9, by which nothing acknowledged is lost


def main(settings: GatewaySettings) -> None:
    if settings.die_with_parent:
        threading.Thread(target=die_with, args=(os.getppid(),), daemon=True).start()
    listener = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        problem = f"listen on {settings.host}:{settings.port} (choose another --port, or end what listens there)"
        listener.bind((settings.host, settings.port))
        listener.listen(4096)
        problem = f"use {settings.run_dir}, --secret-file or --engine-key-file (does another gateway use this run?)"
        app = create_app(settings)
    except (OSError, OverflowError, sqlite3.Error) as error:
        print(f"gateway: cannot {problem}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="critical", access_log=False,
                            timeout_keep_alive=75, timeout_graceful_shutdown=1, server_header=False, date_header=False)
    log("listening", url=f"http://{settings.host}:{listener.getsockname()[1]}", run_dir=str(settings.run_dir))
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    import tyro

    main(tyro.cli(GatewaySettings))

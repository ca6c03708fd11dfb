"""The gateway: rollouts, their keys, the model proxy that harnesses call, the turn log, and the hold during an update.

    trainer --POST /rollouts--> queue --POST /claim--> controller --agent key--> harness (--verifier key--> verifier)
    harness --/v1/...--> [key, dialect] -> gate -> render -> splice -> gate -> generate -> derender -> log -> reply
    trainer --/pause--> the gate closes: new calls wait at it; generations that the engine aborts come back with their
            ids, wait at it too, and go on from those ids after /resume. The harness sees one slow reply.
    trainer <--GET /finished (long poll)-- rollouts in the order in which they ended

A call is a task of its own, and a connection reads from it: if the client leaves, the call goes on for a grace time and
the same request finds it again; later, or after a crash, the log gives the reply or the ids to go on from.

One process, one event loop, one SQLite connection (WAL), which is the state: in memory besides it are the open calls
and a cache. What is written is committed before the next `await`, so a transaction is what happens between two of them,
and before the reply that depends on it: `kill -9` loses nothing that was acknowledged (synchronous=NORMAL: a power cut
may take the last moments, never half of one). What a killed gateway was sampling is gone with its connections;
harnesses retry.

    python gateway.py --run-dir runs/demo --engine-url http://127.0.0.1:8000 --engine-key-file K --port 8100
It makes runs/demo/{gateway.sqlite,secret} where they are missing. Its log is JSON lines on stderr.
"""

import asyncio
import contextlib
import functools
import gc
import hmac
import os
import re
import socket
import sqlite3
import sys
import time
import traceback
import zlib
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
import orjson
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError, validate_call
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router

from calls import Attempt, Call, Text, Vocabulary, address, blake2b, unpacked
from config import make_key, read_secret
from dialects import DIALECTS, JSON, ApiError, Ask

MAX_EVENT = 256 * 1024  # bytes
STRAGGLER_SECONDS = 5.0  # after a pause, a request that waits inside the paused engine is taken back
RETRY_AFTER = {429: {"retry-after": "1"}, 503: {"retry-after": "5"}}
OVERFLOW = re.compile(r"maximum (context|model) length|context length|max_model_len", re.IGNORECASE)
# turns.ids: int32, prompt and response without the first `shared`, which are those of turn `parent`; logprobs: float64
# turns.status: ok (reply logged, delivery unknown), delivered, aborted (the client left), error
# messages: a message and (`before`) the conversation before it, addressed by the hash of both
SCHEMA = """
CREATE TABLE IF NOT EXISTS groups(name TEXT PRIMARY KEY, body BLOB);
CREATE TABLE IF NOT EXISTS rollouts(id TEXT PRIMARY KEY, "group" TEXT, "index" INT, kind TEXT,
    status TEXT DEFAULT 'queued', attempts INT DEFAULT 0, controller TEXT, agent_over INT DEFAULT 0, exit_status INT,
    machinery TEXT, reason TEXT DEFAULT '', reward REAL, metrics TEXT DEFAULT '{}', truncated INT DEFAULT 0,
    turns INT DEFAULT 0, calls INT DEFAULT 0, sampled_tokens INT DEFAULT 0, version_min INT, version_max INT,
    seq INT UNIQUE, started_at REAL, finished_at REAL);
CREATE INDEX IF NOT EXISTS rollouts_status ON rollouts(status);
CREATE TABLE IF NOT EXISTS turns(rollout TEXT, attempt INT, "index" INT, status TEXT, error TEXT, name TEXT,
    digest BLOB, dialect TEXT, fork TEXT, parent INT, shared INT, prompt INT, finish_reason TEXT, stop_string TEXT,
    opening BLOB, request BLOB, reply BLOB, meaning BLOB, started_at REAL, finished_at REAL,
    versions BLOB, ids BLOB, logprobs BLOB,
    PRIMARY KEY(rollout, attempt, "index"));
CREATE INDEX IF NOT EXISTS turns_digest ON turns(digest);
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
    engine_url: str  # Engines that speak vLLM's routes, e.g. http://127.0.0.1:8000; several separated by commas.
    port: int = 0  # Port to listen on. 0: a free one, which the first log line tells.
    host: str = "127.0.0.1"  # Address to listen on.
    secret_file: Path | None = None  # What all keys are made from. None: RUN_DIR/secret, made if missing.
    engine_key_file: Path | None = None  # File with the engine's bearer key.
    engine_retry: float = 60.0  # Seconds for which a call waits for an engine that fails before it gets 503.
    max_open_calls: int = 64  # Open model calls of one rollout; more get 429.
    max_body: int = 64 * 2**20  # Bytes of one request; more get 413.
    keepalive: float = 15.0  # Seconds of silence after which a waiting client gets an empty event, or white space.
    grace: float = 30.0  # Seconds for which a call whose client has left goes on.
    # Where sampled ids take the place of the rendered ones in a prompt. exact: nowhere. tokens: where both are the
    # same text. messages: also where the harness sent our message back unchanged and the template rewrote it (took out
    # the thinking, say).
    history: Literal["exact", "tokens", "messages"] = "tokens"
    tokenizer: str = ""  # The model's directory (with tokenizer.json) or hub name. Empty: what the engine calls `root`.


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


def loaded(data: bytes | None) -> Any:
    return None if data is None else orjson.loads(zlib.decompress(data))


class Engine:
    """The engines' routes, asked until they answer, and the gate before them. A pause is a lease; it and the time spent
    paused survive a restart. The engine's own pause is the trainer's business (vllm_control)."""

    def __init__(self, settings: GatewaySettings, db: sqlite3.Connection) -> None:
        self.urls = [url.rstrip("/") for url in settings.engine_url.split(",")]
        self.patience, self.db = settings.engine_retry, db
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

    async def card(self, engine: str = "") -> JSON:
        """The engines' model: {"id", "max_model_len"?, ...}."""
        self.model = self.model or (await self.ask("/v1/models", engine=engine))["data"][0]
        return self.model

    async def ask(self, path: str, body: JSON | None = None, gated: bool = True, call: Call | None = None,
                  engine: str = "") -> Any:
        """The JSON of the first answer that is a result. A `call` receives its answer itself, and each try continues
        it until it is finished. A try that brought tokens, or was held, starts the patience anew.
        ApiError: 400 the engine's, 503 no engine."""
        pause, deadline = 0.0, 0.0
        url = (engine or self.urls[0]) + path
        while True:
            if (gated or deadline) and await self.gate():
                pause = deadline = 0.0
            limit, kept = asyncio.timeout(None), len(call.ids) if call else 0
            self.in_flight.add(limit)
            try:
                data = orjson.dumps(call.continuation() if call else body) if call or body else None
                async with limit, self.http.request("POST" if data else "GET", url, data=data) as response:
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
                raise ApiError(503, f"engine {url} kept failing: {fault!r}", "engine_unavailable")
            elif pause == 0.05:
                log("engine_retry", url=url, error=repr(fault))
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
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=NORMAL", "wal_autocheckpoint=4000"):
            self.db.execute(f"PRAGMA {pragma}")
        self.db.executescript(SCHEMA)
        self.db.execute("UPDATE rollouts SET machinery = 'the gateway was started again' WHERE status = 'running'")
        self.db.commit()
        self.engine = Engine(settings, self.db)
        self.bell = asyncio.Event()  # for long polls; replaced when set
        self.attempts: dict[tuple[str, int], Attempt] = {}  # that run; made from the log where missing
        self.channels: dict[Any, str] = {}
        self.vocabulary = Vocabulary(settings.tokenizer) if settings.tokenizer else None

    def count(self, name: str) -> None:
        self.db.execute("INSERT INTO counts VALUES(?, 1) ON CONFLICT(name) DO UPDATE SET n = n + 1", (name,))

    def put(self, table: str, **columns: Any) -> None:
        names, marks = ", ".join(f'"{column}"' for column in columns), ", ".join("?" * len(columns))
        self.db.execute(f"INSERT OR REPLACE INTO {table}({names}) VALUES({marks})", (*columns.values(),))

    def event(self, rollout: str, attempt: int, kind: str, data: Any) -> None:
        self.put("events", rollout=rollout, attempt=attempt, kind=kind, data=packed(data), at=time.time())

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

    def authenticate(self, request: Request) -> tuple[str, str, int]:
        """Scope, rollout and attempt of the request's key."""
        header = request.headers.get("authorization", "")
        key = header[7:] if header[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        scope, rollout, number, *_ = [*key.split("-"), "", "", ""]
        attempt = int(number) if re.fullmatch(r"[0-9]{1,9}", number) else 0
        if not hmac.compare_digest(make_key(self.secret, scope, rollout, attempt).encode(), key.encode()):
            raise ApiError(401, "missing or wrong key: send this rollout's key as bearer token", "invalid_api_key")
        return scope, rollout, attempt

    def identify(self, request: Request, scopes: str) -> sqlite3.Row | None:
        """The rollout of the request's key, None for an admin's; the key must be in force."""
        scope, rollout, attempt = self.authenticate(request)
        if scope not in scopes.split():
            raise ApiError(403, f"a key of scope {scope!r} may not call this route", "wrong_scope")
        if scope == "admin":
            return None
        row = self.rollout(rollout)
        if not runs(row, attempt) or (scope == "agent" and row["agent_over"]):
            raise ApiError(401, f"expired key: attempt {attempt} of {rollout} is over", "key_expired")
        if request.path_params.get("id", rollout) != rollout:
            raise ApiError(403, "this key belongs to another rollout", "wrong_rollout")
        return row

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
            raise ApiError(409, f"group {group.group!r} exists with other contents: a resumed run needs the tasks and "
                                "the settings of rollouts that it began with", "conflict")
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
        """The agent's key dies, and its open calls end."""
        self.set(rollout, agent_over=1)
        self.db.commit()
        if (rollout, attempt) in self.attempts:
            await self.attempts[rollout, attempt].cancel()

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
        self.attempts.pop((row["id"], attempt), None)
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
        held = sum(len(attempt.open) for attempt in self.attempts.values()) - in_flight if paused else 0
        return {"paused": paused, "version": self.engine.hold["version"], "in_flight": in_flight,
                "held": held, "held_seconds": self.engine.held_seconds(),
                "queued": count.pop("queued", 0), "running": count.pop("running", 0), "finished": sum(count.values()),
                "counts": dict(self.db.execute("SELECT name, n FROM counts ORDER BY name").fetchall())}

    async def metrics(self, request: Request, /) -> Response:
        """The state as Prometheus reads it."""
        state = await self.state(request)
        lines = [f'harnessed_total{{name="{name}"}} {count}' for name, count in state.pop("counts").items()]
        lines += [f"harnessed_{name} {float(value)}" for name, value in state.items()]
        return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def steps(self, request: Request, /, step: Int, **rest: Any) -> None:
        self.put("steps", step=step, data=packed({"step": step, **rest}))

    async def health(self, request: Request, /) -> None:
        """For those who wait until the gateway is up."""

    # ---- conversations and turns

    def remember(self, messages: list[Any]) -> bytes:
        """Stores a conversation and returns the address of its end. Each message is kept once, however many turns and
        rollouts begin with the same ones: an address is made of all that was said so far."""
        data = [orjson.dumps(message) for message in messages]
        addresses = list(accumulate(data, lambda before, part: blake2b(before + part), initial=b""))
        for before, after, part in [*zip(addresses, addresses[1:], data)][::-1]:
            if self.db.execute("SELECT 1 FROM messages WHERE hash = ?", (after,)).fetchone():
                break  # and so are all before it
            self.put("messages", hash=after, before=before, data=zlib.compress(part, 1))
        return addresses[-1]

    def recall(self, address: bytes, seen: dict[bytes, tuple[bytes, Any]]) -> list[Any]:
        messages = []
        while address:
            if address not in seen:
                row = self.db.execute("SELECT before, data FROM messages WHERE hash = ?", (address,)).fetchone()
                seen[address] = row["before"], loaded(row["data"])
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
        page, seen, plain = [], {}, ("index", "finish_reason", "status", "error", "fork", "dialect")
        for turn, ids in self.sequences(row["id"], row["attempts"], after + limit):
            if turn["index"] <= after:
                continue
            page.append({"prompt_ids": unpacked(ids[: 4 * turn["prompt"]]),
                         "response_ids": unpacked(ids[4 * turn["prompt"] :]),
                         "logprobs": None if turn["logprobs"] is None else array("d", turn["logprobs"]).tolist(),
                         "versions": loaded(turn["versions"]),
                         "delivered": turn["status"] in ("ok", "delivered"),
                         **{key: turn[key] for key in plain}})
            if messages:
                said = self.recall(turn["request"], seen)
                tools = said.pop(0)["tools"] if said and "tools" in said[0] and "role" not in said[0] else None
                page[-1] |= {"messages": said, "tools": tools, "message": loaded(turn["reply"])}
        return {"turns": page, "next": page[-1]["index"] if len(page) == limit else None}

    def attempt(self, row: sqlite3.Row) -> Attempt:
        """A new one goes to the engine with the fewest, and stays: that one's prefix cache has its earlier turns."""
        if (owner := (row["id"], row["attempts"])) not in self.attempts:
            load = Counter(other.engine for other in self.attempts.values())
            attempt = Attempt(owner, min(self.engine.urls, key=lambda url: load[url]), row["calls"])
            for turn, ids in self.sequences(*owner):
                attempt.add(turn["index"], ids, attempt.parent(ids), turn["meaning"], turn["opening"])
            self.attempts[owner] = attempt
        return self.attempts[owner]

    def log_turn(self, call: Call, status: str, error: str | None = None) -> None:
        """The turn is durable when this returns. A call that sampled nothing leaves no turn."""
        if not call.ids:
            return
        attempt = call.attempt
        meaning = address(call.addresses[-1], call.message) if call.addresses and call.message else None
        ids = call.prompt + array("i", call.ids).tobytes()
        if call.turn:
            index, parent, shared, logged = call.turn
        else:
            place = shared, whole, parent = attempt.parent(ids)
            index, logged = attempt.turns, 0
        with self.db:
            if not call.turn:
                call.fork = None if whole else call.fork or "branch"
                if call.fork:
                    self.count(f"fork_{call.fork}")
            complete = len(call.logprobs) == len(call.ids) and None not in call.logprobs
            self.put("turns", rollout=attempt.owner[0], attempt=attempt.owner[1], index=index, status=status,
                     error=error, name=call.name, digest=call.digest, dialect=call.path.removeprefix("/v1/"),
                     fork=call.fork, parent=parent, shared=shared, prompt=len(call.prompt) // 4,
                     finish_reason=call.finish, stop_string=call.stop_string, opening=call.opening,
                     request=self.remember(call.messages),
                     reply=packed(call.message) if call.message else None, meaning=meaning,
                     started_at=call.started_at, finished_at=time.time(),
                     versions=packed(call.versions), ids=ids[4 * shared:],
                     logprobs=array("d", call.logprobs).tobytes() if complete else None)
            self.db.execute(
                "UPDATE rollouts SET turns = turns + ?1, sampled_tokens = sampled_tokens + ?2, "
                "version_min = min(coalesce(version_min, ?3), ?3), version_max = max(coalesce(version_max, ?4), ?4), "
                "truncated = truncated OR ?5 WHERE id = ?6",
                (not call.turn, len(call.ids) - logged, min(call.versions), max(call.versions),
                 call.finish == "length" and len(call.ids) >= call.room, attempt.owner[0]))
        if call.turn:
            attempt.replies[meaning] = index
        else:
            attempt.add(index, ids, place, meaning, call.opening)
        call.turn = index, parent, shared, len(call.ids)

    def ending(self, call: Call, status: str, error: str | None = None) -> None:
        """What became of a turn's reply. If a crash is faster its delivery is unknown, and it can be replayed."""
        sql = 'UPDATE turns SET status = ?, error = ? WHERE rollout = ? AND attempt = ? AND "index" = ?'
        with contextlib.suppress(sqlite3.Error), self.db:  # a full disk
            self.db.execute(sql, (status, error, *call.attempt.owner, call.turn[0] if call.turn else None))

    # ---- model calls

    async def models(self, request: Request, /) -> JSON:
        card = {"object": "model", "type": "model", "created": 0, "created_at": "1970-01-01T00:00:00Z",
                "owned_by": "harnessed", **await self.engine.card()}
        card["display_name"] = card["id"]
        return {"object": "list", "data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}

    async def count_tokens(self, request: Request, data: bytes) -> Response:
        self.identify(request, "agent")
        call = Call(Attempt(), "/v1/messages", DIALECTS["/v1/messages"].ask(parse_json(data)), b"", "", {}, 1, 1)
        return answer({"input_tokens": len((await self.rendered(call))["token_ids"])})

    async def call(self, request: Request, data: bytes) -> Callable[..., Awaitable[None]]:
        path, retry = request.url.path, request.headers.get("x-stainless-retry-count", "0") not in ("", "0")
        row = self.identify(request, "agent")
        assert row
        attempt, ask = self.attempt(row), DIALECTS[path].ask(parse_json(data))
        # Equal is what asks for the same: retries of Codex have other key orders, of Claude Code ask for no stream.
        asked = {key: value for key, value in ask.body.items() if key not in ("stream", "stream_options")}
        digest = blake2b(path.encode() + orjson.dumps(asked, option=orjson.OPT_SORT_KEYS))
        group = orjson.loads(row["body"])
        sampling, room = group["sampling"], group["context_limit"] or 2**31
        limits = [ask.max_tokens, sampling.pop("max_tokens"), room]
        call = Call(attempt, path, ask, digest, f"{row['id']}-{row['attempts']}-{attempt.calls}", sampling,
                    min(filter(None, limits)), room)
        earlier = self.earlier(call, retry)
        if isinstance(earlier, Call):
            return functools.partial(self.serve, earlier, ask)
        if len(attempt.open) >= self.settings.max_open_calls:
            attempt.failed[digest] += 1
            raise ApiError(429, f"{self.settings.max_open_calls} calls of {row['id']} are open, the most allowed",
                           "too_many_calls")
        if earlier:
            self.restore(call, earlier)
        else:
            attempt.calls += 1
            changed = [key for key in sampling if ask.sampling.get(key) not in (None, sampling[key])]
            call.news = [f"override_{key}" for key in [*changed, *ask.overridden]]
        attempt.open[call] = None
        call.task = asyncio.create_task(self.run(call))
        call.task.add_done_callback(lambda _: self.ended(call))
        return functools.partial(self.serve, call, ask)

    def earlier(self, call: Call, retry: bool) -> Call | sqlite3.Row | None:
        """The open call, or the logged turn, that this request repeats: one whose client is gone and which nothing
        continues; or any, if the request says that it is a retry. Otherwise equal requests are separate samples."""
        open_calls = [other for other in call.attempt.open if other.digest == call.digest]
        taken = {other.turn[0] for other in open_calls if other.turn}
        rows = [row for row in self.db.execute(
            'SELECT * FROM turns AS turn WHERE digest = ? AND rollout = ? AND attempt = ? AND NOT EXISTS (SELECT 1 '
            'FROM turns AS later WHERE later.rollout = turn.rollout AND later.attempt = turn.attempt AND '
            'later.parent = turn."index" AND later.shared > turn.prompt) ORDER BY "index" DESC',
            (call.digest, *call.attempt.owner)).fetchall() if row["index"] not in taken]
        gone: list[Any] = [other for other in open_calls if not other.readers]
        gone += [row for row in rows if row["status"] != "delivered"]
        if gone or not retry:
            return gone[0] if gone else None
        if call.attempt.failed[call.digest]:  # it is that one's retry
            call.attempt.failed[call.digest] -= 1
            return None
        return (open_calls + rows or [None])[0]

    def restore(self, call: Call, row: sqlite3.Row) -> None:
        """What the log has of a turn, to be replied again, or to go on."""
        *_, (_, ids) = self.sequences(*call.attempt.owner, row["index"])
        call.name, call.started_at, call.finish = row["name"], row["started_at"], row["finish_reason"]
        call.prompt, call.ids = ids[:4 * row["prompt"]], unpacked(ids[4 * row["prompt"]:])
        call.logprobs = array("d", row["logprobs"] or b"").tolist()
        call.versions, call.stop_string = loaded(row["versions"]), row["stop_string"]
        call.fork = row["fork"]
        call.message = loaded(row["reply"])
        call.turn = row["index"], row["parent"], row["shared"], len(call.ids)
        call.news = ["replayed" if row["reply"] else "continued"]

    async def run(self, call: Call) -> JSON:
        """One call from request to logged turn. Cancelled when its client stays away or its attempt is over."""
        try:
            if call.message is None:
                await self.render(call)
                if not call.finish:
                    await self.engine.ask("/inference/v1/generate", call=call, engine=call.attempt.engine)
                call.message = await self.parse(call, call.ids)
                self.settle(call, "ok")
                self.log_turn(call, "ok")
            else:
                self.settle(call, "ok")
                self.db.commit()
            return call.completion()
        except (Exception, asyncio.CancelledError) as error:  # the boundary of one call
            failure = as_api_error(error)
            try:
                self.failed(call, failure)
            except sqlite3.Error:  # a full disk is what it may be about
                self.db.rollback()
            raise failure from None

    def settle(self, call: Call, outcome: str) -> None:
        """Counts what happened to a call."""
        for name in [*call.news, f"call_{outcome}"]:
            self.count(name)
        self.set(call.attempt.owner[0], calls=call.attempt.calls)

    def failed(self, call: Call, failure: ApiError) -> None:
        self.settle(call, failure.code or "error")
        if failure.status >= 500:  # a harness that gives up now is lost, not failed
            self.set(call.attempt.owner[0], machinery=failure.message)
        if failure.code == "context_length_exceeded":
            self.set(call.attempt.owner[0], truncated=1)
        self.log_turn(call, "aborted" if failure.code == "aborted" else "error", failure.message)
        self.db.commit()

    async def rendered(self, call: Call) -> JSON:
        card = await self.engine.card(call.attempt.engine)
        call.model, call.room = card["id"], min(call.room, card.get("max_model_len") or 2**31)
        if not self.vocabulary and Path(str(card.get("root")), "tokenizer.json").is_file():
            self.vocabulary = Vocabulary(card["root"])
        if (prompt := call.ask.prompt) is None:
            return await self.engine.ask("/v1/chat/completions/render", call.chat, engine=call.attempt.engine)
        if isinstance(prompt, str):  # of megabytes it takes seconds
            prompt = (await asyncio.to_thread(self.words().tokenizer.encode_batch_fast, [prompt]))[0].ids
        return {"token_ids": prompt}

    def words(self) -> Vocabulary:
        if not self.vocabulary:
            raise ApiError(503, "the gateway has no tokenizer: start it with --tokenizer", "no_tokenizer")
        return self.vocabulary

    async def render(self, call: Call) -> None:
        call.address()
        rendered = await self.rendered(call)
        if not call.turn:
            spelling = self.vocabulary.spelling if self.vocabulary else None
            ids = array("i", rendered["token_ids"]).tobytes()
            call.prompt, call.fork = call.attempt.splice(
                ids, call.addresses, call.opening, self.settings.history, spelling)
        size = len(call.prompt) // 4
        call.room -= size
        if call.room < 1:
            raise ApiError(400, f"This model's maximum context length is {call.room + size} tokens, but the "
                                f"messages have {size} tokens. Shorten them.", "context_length_exceeded")
        call.max_tokens = min(call.max_tokens, call.room)
        if stops := (rendered.get("sampling_params") or {}).get("stop_token_ids"):
            call.sampling["stop_token_ids"] = stops
        if call.ask.stop or (call.ask.stream and self.vocabulary):
            call.text, call.channel = Text(self.words(), call.ask.stop, call.ids), await self.channel(call)

    async def channel(self, call: Call) -> str:
        """What this model's plain text is to the engine's parsers, which depends on how the prompt ends and on what
        was asked: content or reasoning. One try with a short text tells."""
        if call.ask.prompt is not None:
            return "content"
        key = call.prompt[-32:], bool(call.ask.tools), repr(call.ask.extra)
        if key not in self.channels:
            tokenizer = self.words().tokenizer
            ids = tokenizer.encode("x y", add_special_tokens=False).ids
            message, text = await self.parse(call, ids, probe=True), tokenizer.decode(ids)
            kinds = (kind for kind in ("content", "reasoning") if message[kind] == text)
            self.channels = dict([*self.channels.items()][-99:]) | {key: next(kinds, "")}
        return self.channels[key]

    async def parse(self, call: Call, ids: list[int], probe: bool = False) -> JSON:
        """The message that the ids are."""
        # The end-of-turn token would leak into the text; with finish reason "stop" it is the last one.
        ids = ids[:-1] if call.finish == "stop" and not call.stop_string and not probe else ids
        message: JSON = {}
        if call.ask.prompt is not None:
            message = {"content": self.words().tokenizer.decode(ids)}
        elif ids:
            choice = {"index": 0, "token_ids": ids, "finish_reason": call.finish or "length", "logprobs": None}
            reply = await self.engine.ask("/v1/chat/completions/derender", {
                "model": call.model, "generate_response": {"request_id": call.name, "choices": [choice]},
                "prompt_tokens": len(call.prompt) // 4, "prompt_token_ids": call.prompt_ids,
                "chat_request": call.chat}, gated=False, engine=call.attempt.engine)
            message = reply["choices"][0]["message"]
        content, calls = message.get("content"), message.get("tool_calls") or []
        if call.stop_string and content:
            content = content.partition(call.stop_string)[0]
        if calls and content:  # templates put their own line break before a call: with two the history would differ
            content = content.rstrip() or None
        return {"role": "assistant", "content": content, "tool_calls": calls,
                "reasoning": message.get("reasoning") or message.get("reasoning_content")}

    def ended(self, call: Call) -> None:
        """The task is done. With a reply, but without a reader, the call waits out its grace time."""
        call.notify()
        if call.failed() and not call.readers:
            call.attempt.open.pop(call, None)

    def leave(self, call: Call, delivered: bool) -> None:
        """A client has gone, with its reply or without."""
        if delivered or call.failed():
            if not delivered and not call.turn:
                call.attempt.failed[call.digest] += 1
            call.attempt.open.pop(call, None)
        elif not call.readers:
            asyncio.get_running_loop().call_later(self.settings.grace, self.abandon, call)

    def abandon(self, call: Call) -> None:
        if not call.readers and not call.task.done():
            call.task.cancel()
        elif not call.readers and call in call.attempt.open:
            del call.attempt.open[call]
            self.ending(call, "aborted", "the client left before its reply, and nobody came back")

    async def serve(self, call: Call, ask: Ask, _: Any, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        """Gives one client the reply of a call, or its error, in its way and as it comes. An ASGI application."""
        stream = call.dialect.stream(ask, call.head) if ask.stream else None
        wake, gone, begun, sent, status = asyncio.Event(), asyncio.ensure_future(receive()), False, 0, 499
        call.readers.add(wake)
        gone.add_done_callback(lambda _: wake.set())

        async def begin(status: int = 200) -> None:
            nonlocal begun
            if not begun:
                begun, streams = True, stream and status == 200
                media = "text/event-stream" if streams else "application/json"
                headers = {"content-type": media, **RETRY_AFTER.get(status, {})}
                await send({"type": "http.response.start", "status": status,
                            "headers": [(name.encode(), value.encode()) for name, value in headers.items()]})
                if streams:
                    await write(stream.start())

        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            while not (gone.done() or call.task.done()):
                wake.clear()
                upto = call.text.readable() if stream and call.text and call.channel else 0
                if stream and call.ids:
                    await begin()
                if upto > sent:
                    await write(stream.text(call.channel, call.text.text[sent:upto]))
                    sent = upto
                try:
                    async with asyncio.timeout(self.settings.keepalive):
                        await wake.wait()
                except TimeoutError:
                    await begin()
                    await write(stream.ping() if stream else b" ")
            if not gone.done():
                try:
                    status, done = 200, call.task.result()
                    await begin()
                    body = stream.finish(done) if stream else orjson.dumps(call.dialect.reply(ask, done))
                except (Exception, asyncio.CancelledError) as error:
                    failure = as_api_error(error)
                    if begun and not stream:
                        raise  # status 200 is said: an answer that breaks off makes the client try again
                    status = failure.status
                    body = stream.fail(failure) if begun else orjson.dumps(call.dialect.error(failure))
                    await begin(status)
                await write(body, False)
                if status == 200:
                    self.ending(call, "delivered")
        finally:
            gone.cancel()
            call.readers.discard(wake)
            self.leave(call, status == 200)
            if stream and stream.mismatch:
                self.count("stream_mismatch")
            log("call", path=call.path, name=call.name, turn=call.turn and call.turn[0], status=status,
                prompt=len(call.prompt) // 4, sampled=len(call.ids), finish=call.finish,
                ms=round(1000 * (time.time() - call.started_at), 1))


# ---- the application


def as_api_error(error: BaseException) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail)
    if isinstance(error, ValidationError):
        problems = [f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:5]]
        return ApiError(400, "; ".join(problems), "invalid_value")
    if isinstance(error, orjson.JSONEncodeError):  # deeper nesting can be read than written
        return ApiError(400, f"this is not a valid JSON object for us: {error}", "invalid_json")
    if isinstance(error, asyncio.CancelledError | ClientDisconnect):
        return ApiError(401, "this call was ended: its client left, or its attempt is over", "aborted")
    log("internal_error", error="".join(traceback.format_exception(error)))
    if isinstance(error, sqlite3.Error):
        return ApiError(503, f"the log cannot be written: {error}", "store_unavailable")
    return ApiError(500, f"internal error: {type(error).__name__}", "internal_error")


async def read(request: Request, limit: int) -> bytes:
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise ApiError(413, f"the request is larger than {limit} bytes", "request_too_large")
    return bytes(data)


def parse_json(data: bytes) -> JSON:
    try:
        return {**orjson.loads(data)}
    except (ValueError, TypeError) as error:
        raise ApiError(400, f"the body is not a valid JSON object: {error}", "invalid_json") from None


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


def make_route(g: Gateway, method: str, path: str, handler: Callable[..., Awaitable[Any]], scopes: str) -> Route:
    """`handler` gets the path's rollout, or else the request, and what was sent as its signature asks. What it returns
    is the answer; None: {"ok": true}."""
    checked = validate_call(handler, config=CHECKS | {"strict": method == "POST"})
    limit = MAX_EVENT if "verifier" in scopes else g.settings.max_body

    async def endpoint(request: Request) -> Any:
        rollout = request.path_params.get("id")
        if scopes:
            g.identify(request, scopes)
        data = await read(request, limit) if method == "POST" else b""
        sent = parse_json(data) if method == "POST" else dict(request.query_params)
        result = await checked(g.rollout(rollout) if rollout else request, **sent)
        g.db.commit()
        return result if isinstance(result, Response) else answer(result or {"ok": True})
    return Route(path, endpoint, methods=[method])


def create_app(settings: GatewaySettings) -> Callable[..., Awaitable[None]]:
    settings.run_dir.mkdir(parents=True, exist_ok=True)
    g = Gateway(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        # Idle sockets close before the engine's 5 s do. Proxy variables are not read: engines are near.
        pool, limits = aiohttp.TCPConnector(limit=0, keepalive_timeout=4), aiohttp.ClientTimeout(None, sock_connect=5)
        async with aiohttp.ClientSession(headers=g.engine.headers, connector=pool, timeout=limits,
                                         read_bufsize=2**20) as g.engine.http:
            yield
            for attempt in [*g.attempts.values()]:
                await attempt.cancel()
        g.db.close()

    handlers = {**dict.fromkeys(DIALECTS, g.call), "/v1/messages/count_tokens": g.count_tokens}

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        """Model calls go straight to their handler: the way through a router would be a tenth of their cost."""
        path, scope["app"] = scope.get("path", ""), app
        if scope["type"] != "http":
            return await app(scope, receive, send)
        request = Request(scope, receive)
        try:
            if path not in handlers or request.method != "POST":
                return await app(scope, receive, send)
            g.authenticate(request)  # nobody else may send megabytes; the handler looks closer
            response = await handlers[path](request, await read(request, settings.max_body))
        except Exception as error:  # the boundary of one request
            g.db.rollback()
            failure = as_api_error(error)
            log("request", method=request.method, path=request.url.path[:200], status=failure.status,
                error=failure.message[:200])
            dialect = DIALECTS["/v1/messages" if path.startswith("/v1/messages") else "/v1/responses"]
            response = answer(dialect.error(failure), failure.status, RETRY_AFTER.get(failure.status))
        await response(scope, receive, send)

    table = [("GET", "/v1/models", g.models, "agent"),
             ("POST", "/rollouts", g.create, "admin"), ("GET", "/rollouts", g.select, "admin"),
             ("POST", "/claim", g.claim, "admin"), ("POST", "/adopt", g.adopt, "admin"),
             ("POST", "/rollouts/{id}/agent_done", g.agent_done, "admin"),
             ("POST", "/rollouts/{id}/report", g.report, "admin"), ("GET", "/finished", g.finished, "admin"),
             ("GET", "/rollouts/{id}", g.get, "admin verifier"),
             ("GET", "/rollouts/{id}/turns", g.turns, "admin verifier"),
             ("POST", "/rollouts/{id}/reward", g.reward, "admin verifier"),
             ("POST", "/rollouts/{id}/events", g.events, "admin verifier"), ("POST", "/pause", g.pause, "admin"),
             ("POST", "/lease", g.lease, "admin"), ("POST", "/resume", g.resume, "admin"),
             ("POST", "/steps", g.steps, "admin"), ("GET", "/state", g.state, "admin"),
             ("GET", "/metrics", g.metrics, "admin"), ("GET", "/health", g.health, ""), ("GET", "/", g.health, "")]
    app = Router([make_route(g, *route) for route in table], lifespan=lifespan)
    return serve


def main(settings: GatewaySettings) -> None:
    try:
        listener = socket.create_server((settings.host, settings.port), backlog=4096)
        app = create_app(settings)
    except (OSError, OverflowError, sqlite3.Error) as error:
        print(f"gateway: cannot listen on {settings.host}:{settings.port} (choose another --port?) or use "
              f"{settings.run_dir} (does another gateway use this run?): {error}", file=sys.stderr)
        raise SystemExit(2) from None
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="critical", access_log=False,
                            timeout_keep_alive=75, timeout_graceful_shutdown=1, server_header=False, date_header=False,
                            proxy_headers=False)
    log("listening", url=f"http://{settings.host}:{listener.getsockname()[1]}", run_dir=str(settings.run_dir))
    gc.freeze()  # what is loaded stays: without this and at the usual rate, a tenth of the time would go into looking
    gc.set_threshold(50_000, 20, 50)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    import tyro

    main(tyro.cli(GatewaySettings))

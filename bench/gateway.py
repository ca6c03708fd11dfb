"""The gateway's cost: against a bare relay, in one run on one machine, one core each.

    python bench/gateway.py [--quick]

    core 0   the gateway (gateway.py as a user starts it), or, in turns of a second, the relay below; never both
    core 1   the load, and a stand-in for the engine that answers at once from prepared bytes

A call is a chat request of 16 kB (system, 3 kB of tools, what was said) whose prompt has 4,000 ids and whose reply has
200 sampled ids with log-probs, on average. Conversations have 5 turns: one fresh request, which no other conversation
shares, and four that continue it by the reply they got and a tool's result. They belong to 64 rollouts, and a rollout
ends after 10 of them. Every reply's text is checked. The relay is what a gateway cannot do without: Starlette, aiohttp
and orjson, the same three engine calls, one SQLite transaction (WAL) that holds the turn.

Medians over rounds, in which gateway and relay alternate at each number of connections, so that a noisy neighbour meets
both. Then the gateway goes on to 20,000 calls (its memory), and holds 1,000 streams during a pause. Exit status 1 if a
bar is missed; the machine must be quiet for the absolute ones.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import re
import resource
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from config import make_key, read_secret  # noqa: E402

LEVELS = (1, 16, 64)
ROLLOUTS, CONVERSATIONS = 64, 10  # that run at once, and how many conversations each has before the next one
VARIANTS, TURNS = 9, 5  # 9 has no common factor with 64: a rollout has conversations of all kinds
PROMPT, SAMPLED, TOOL = 4000, 200, 100  # ids, on average; TOOL: of a tool's result
WORDS, EOS = 30_000, 30_256  # the vocabulary: bytes, words, the end of a turn
HELD = 1000
JSON = dict[str, Any]


# ---- what is said, prepared for each variant and turn


def text(ids: list[int]) -> str:
    return "".join(f" w{i:05}" for i in ids if i != EOS)


def http(body: Any, kind: str = "application/json") -> bytes:
    body = body if isinstance(body, bytes) else orjson.dumps(body)
    return f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class Script:
    """The bodies of requests, and what the engine answers. A turn's key is in its last message, is the last id of its
    prompt and the first one of its sample, so that the stand-in need not parse the rest. In every ninth conversation
    the rendered history spells a sampled word in bytes, as a tokenizer may."""

    def __init__(self) -> None:
        rng, self.answers, self.bodies, self.said = random.Random(0), {}, [], []

        def words(n: int) -> list[int]:
            return [rng.randrange(1256, WORDS) for _ in range(n)]

        common = words(1000)
        command = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
        tools = [{"type": "function", "function": {
            "name": f"tool_{i}", "description": text(common[:60]), "parameters": command}} for i in range(6)]
        # of a text that is none of these: the gateway may try how a short one is parsed
        message = {"role": "assistant", "content": "x y"}
        self.answers["derender", 0] = http({"choices": [{"index": 0, "message": message}]})
        for variant in range(VARIANTS):
            ids = common + words(PROMPT - 2 * (SAMPLED + TOOL) - 1000)
            messages: list[Any] = [{"role": "system", "content": text(common[:500])},
                                   {"role": "user", "content": "task ######## " + text(ids[1000:])[:5200]}]
            for key in range(256 + variant * TURNS, 256 + variant * TURNS + TURNS):
                messages[-1]["content"] += f" key {key} "
                ids[-1], sample = key, [key, *words(SAMPLED - 2), EOS]
                call = {"id": f"call_{key}", "type": "function", "function": {
                    "name": "tool_1", "arguments": f'{{"command":"ls {key}"}}'}}
                message = {"role": "assistant", "content": text(sample), "tool_calls": [call]}
                self.prepare(key, ids, sample, message)
                body = {"model": "policy", "messages": messages, "tools": tools, "max_tokens": SAMPLED}
                self.bodies.append(orjson.dumps(body).split(b"########"))
                self.said.append(text(sample)[:40].encode())
                messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": text(words(TOOL))}]
                ids += (spelled(sample) if variant == 0 else sample) + words(TOOL)

    def prepare(self, key: int, ids: list[int], sample: list[int], message: JSON) -> None:
        def choice(ids: list[int], finish: str | None) -> JSON:
            content = [{"token": str(i), "token_id": i, "logprob": -0.0123456789 - i / 1e5} for i in ids]
            return {"choices": [{
                "index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": finish,
                "weight_versions": [{"version": "0", "start": 0, "end": SAMPLED}] if finish else None}]}

        stream = b"".join(b"data: %b\n\n" % orjson.dumps(choice([i], "stop" if i == EOS else None)) for i in sample)
        self.answers |= {
            ("render", key): http({"token_ids": ids, "sampling_params": {"stop_token_ids": [EOS]}}),
            ("generate", key): http(choice(sample, "stop")),
            ("stream", key): http(stream + b"data: [DONE]\n\n", "text/event-stream"),
            ("derender", key): http({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})}

    def request(self, key: str, conversation: int, turn: int, stream: bool = False) -> bytes:
        before, after = self.bodies[conversation % VARIANTS * TURNS + turn]
        after = after[:-1] + b',"stream":true}' if stream else after
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: " \
               f"application/json\r\ncontent-length: {len(before) + 8 + len(after)}\r\n\r\n"
        return b"%b%b%08d%b" % (head.encode(), before, conversation, after)

    def check(self, conversation: int, turn: int, answer: bytes) -> None:
        assert self.said[conversation % VARIANTS * TURNS + turn] in answer, answer[:2000]


def make_tokenizer(directory: Path) -> None:
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġw{i:05}" for i in range(256, WORDS + 256))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    assert tokenizer.decode(spelled([300, 301])) == text([300, 301]) and tokenizer.token_to_id("<|im_end|>") == EOS


def spelled(sample: list[int]) -> list[int]:
    """The same text in other ids: the second word in bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [sample[0], *(alphabet.index(c) for c in f"Ġw{sample[1]:05}"), *sample[2:]]


# ---- the stand-in and the relay


class StandIn(asyncio.Protocol):
    """An engine as fast as Python allows: keys are found in the bytes, answers are prepared."""

    def __init__(self, script: Script, card: bytes) -> None:
        self.answers, self.card, self.buffer = script.answers, card, b""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        while (start := self.buffer.find(b"\r\n\r\n") + 4) > 3:
            length = re.search(rb"(?i)content-length: (\d+)", self.buffer[:start])
            end = start + int(length[1]) if length else start
            if len(self.buffer) < end:
                return
            path, body = self.buffer[:80].split(b" ", 2)[1], self.buffer[start:end]
            self.buffer = self.buffer[end:]
            self.transport.write(self.answer(path, body))

    def answer(self, path: bytes, body: bytes) -> bytes:
        if path.endswith(b"/derender"):
            key = int(re.search(rb'"token_ids":\[(\d+)', body)[1])
            return self.answers.get(("derender", key), self.answers["derender", 0])
        if path.endswith(b"/render"):
            return self.answers["render", int(body[(at := body.rindex(b"key ") + 4) : at + 3])]
        if path.endswith(b"/generate"):
            end = body.index(b"]", body.index(b'"token_ids":['))
            return self.answers["stream" if b'"stream":true' in body else "generate",
                                int(body[body.rindex(b",", 0, end) + 1 : end])]
        return self.card


def serve_engine(port: int, script: Script, model: Path) -> None:
    os.sched_setaffinity(0, {1})
    card = http({"object": "list", "data": [{"id": "policy", "root": str(model), "max_model_len": 32768}]})

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(
            lambda: StandIn(script, card), "127.0.0.1", port, backlog=4096)
        await server.serve_forever()
    uvloop.run(serve())


def serve_relay(port: int, engine: str, directory: Path) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    os.sched_setaffinity(0, {0})
    db = sqlite3.connect(directory / "relay.sqlite")
    db.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"
                     "CREATE TABLE turns(prompt INT, ids BLOB, logprobs BLOB, body BLOB, reply BLOB)")
    session: list[aiohttp.ClientSession] = []

    async def ask(path: str, body: Any) -> Any:
        if not session:
            session.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20,
                                                 headers={"content-type": "application/json"}))
        async with session[0].post(engine + path, data=orjson.dumps(body)) as response:
            return orjson.loads(await response.read())

    async def chat(request: Request) -> Response:
        data = await request.body()
        body = orjson.loads(data)
        prompt = (await ask("/v1/chat/completions/render", body))["token_ids"]
        choice = (await ask("/inference/v1/generate", {"model": "policy", "token_ids": prompt, "stream": False,
                  "sampling_params": {"temperature": 1.0, "max_tokens": SAMPLED, "logprobs": 0}}))["choices"][0]
        ids, finish = choice["token_ids"], choice["finish_reason"]
        logprobs = array("d", [item["logprob"] for item in choice["logprobs"]["content"]])
        message = (await ask("/v1/chat/completions/derender", {
            "model": "policy", "generate_response": {"request_id": "x", "choices": [{
                "index": 0, "token_ids": ids[:-1], "finish_reason": finish, "logprobs": None}]},
            "prompt_tokens": len(prompt), "prompt_token_ids": prompt, "chat_request": body}))["choices"][0]["message"]
        reply = orjson.dumps({"id": "x", "object": "chat.completion", "created": int(time.time()), "model": "policy",
                              "choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": {
                                  "prompt_tokens": len(prompt), "completion_tokens": len(ids)}})
        with db:
            db.execute("INSERT INTO turns VALUES(?, ?, ?, ?, ?)", (
                len(prompt), array("i", prompt + ids).tobytes(), logprobs.tobytes(), data, reply))
        return Response(reply, media_type="application/json")

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    uvicorn.run(app, port=port, loop="uvloop", http="httptools", log_level="critical", access_log=False, backlog=4096)


# ---- the load


class Client(asyncio.Protocol):
    """One connection that sends prepared bytes and takes the whole answer."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer, self.answer = transport, b"", None

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if (start := self.buffer.find(b"\r\n\r\n") + 4) < 4:
            return
        length = re.search(rb"(?i)content-length: (\d+)", self.buffer[:start])
        whole = len(self.buffer) >= start + int(length[1]) if length else self.buffer.endswith(b"\r\n0\r\n\r\n")
        if whole and not self.answer.done():
            self.answer.set_result(self.buffer)

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer and not self.answer.done():
            self.answer.set_exception(error or ConnectionError("closed before the answer was whole"))

    async def ask(self, data: bytes) -> bytes:
        self.buffer, self.answer = b"", asyncio.get_running_loop().create_future()
        self.transport.write(data)
        answer = await self.answer
        assert answer[9:12] == b"200", answer[:2000]
        return answer


async def connect(port: int) -> Client:
    return (await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port))[1]


class Load:
    """Conversations with the server at `port`, as many at once as there are connections. `key`: of a conversation."""

    def __init__(self, script: Script, port: int, key: Callable[[int], Awaitable[str]]) -> None:
        self.script, self.port, self.key, self.conversation, self.calls = script, port, key, 0, 0

    async def talk(self, until: Callable[[], bool], latencies: list[float]) -> None:
        client = await connect(self.port)
        while not until():
            self.conversation += 1
            conversation, key = self.conversation, await self.key(self.conversation)
            for turn in range(TURNS):
                if until():
                    break
                started = time.perf_counter()
                answer = await client.ask(self.script.request(key, conversation, turn))
                latencies.append(1000 * (time.perf_counter() - started))
                self.script.check(conversation, turn, answer)
                self.calls += 1
        client.transport.close()

    async def measure(self, connections: int, seconds: float = 1e9, calls: int = 10**9) -> tuple[float, list[float]]:
        """Calls a second and their milliseconds, until so many seconds are over or so many calls were made, ever."""
        latencies, started = [], time.perf_counter()

        def over() -> bool:
            return time.perf_counter() >= started + seconds or self.calls >= calls
        await asyncio.gather(*(self.talk(over, latencies) for _ in range(connections)))
        return len(latencies) / (time.perf_counter() - started), sorted(latencies)


class Rollouts:
    """The trainer's and the controller's side: rollouts that start, run and end."""

    def __init__(self, port: int, secret: str) -> None:
        self.port, self.admin, self.lock, self.waves = port, make_key(secret, "admin"), asyncio.Lock(), []

    async def ask(self, path: str, **body: Any) -> Any:
        client, data, method = await connect(self.port), orjson.dumps(body) if body else b"", "POST" if body else "GET"
        answer = await client.ask(f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self.admin}\r\n"
                                  f"content-length: {len(data)}\r\n\r\n".encode() + data)
        client.transport.close()
        return orjson.loads(answer[answer.index(b"\r\n\r\n") + 4 : answer.rindex(b"}") + 1])

    async def key(self, conversation: int) -> str:
        """The key of the rollout that has this conversation. A wave of rollouts ends when the next but one begins."""
        wave = conversation // (ROLLOUTS * CONVERSATIONS)
        async with self.lock:
            if wave == len(self.waves):
                await self.ask("/rollouts", group=f"wave{wave}", n=ROLLOUTS, task={"id": "t"},
                                sampling={"max_tokens": 1000})
                self.waves.append((await self.ask("/claim", controller="bench", max=ROLLOUTS))["rollouts"])
                for rollout in self.waves[wave - 2] if wave > 1 else ():
                    await self.ask(f"/rollouts/{rollout['id']}/report", attempt=1, status="failed")
        return self.waves[wave][conversation % ROLLOUTS]["agent_key"]


def memory_mb(pid: int) -> float:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def cpu_seconds(pid: int) -> float:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / 100


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def compare(loads: dict[str, Load], pids: dict[str, int], rounds: int, seconds: float) -> dict[Any, JSON]:
    """Medians over rounds, for each server and number of connections."""
    every: dict[Any, list[JSON]] = {(name, level): [] for name in loads for level in LEVELS}
    for number in range(-1, rounds):  # the first one warms up
        for level in LEVELS:
            for name, load in list(loads.items())[:: 1 if number % 2 else -1]:
                cpu, calls = cpu_seconds(pids[name]), load.calls
                speed, times = await load.measure(level, seconds)
                cpu, p50, p99 = cpu_seconds(pids[name]) - cpu, statistics.median(times), times[int(0.99 * len(times))]
                every[name, level].append({"calls/s": speed, "p50 ms": p50, "p99 ms": p99, "p99/p50": p99 / p50,
                                           "CPU ms": 1000 * cpu / (load.calls - calls)})
    return {key: {what: statistics.median(row[what] for row in rows[1:]) for what in rows[0]}
            for key, rows in every.items()}


async def hold(load: Load, rollouts: Rollouts) -> tuple[float, float, float]:
    """The slowest control call while 1,000 streams are held, and before, while they come all at once; and in what time
    all end after the resume."""
    async def stream(conversation: int) -> None:
        client, key = await connect(load.port), await rollouts.key(conversation)
        answer = await client.ask(load.script.request(key, conversation, 0, stream=True))
        assert b"data: [DONE]" in answer and b'"error"' not in answer
        client.transport.close()

    coming, slowest, held, end = 0.0, 0.0, 0, time.perf_counter() + 60
    await rollouts.ask("/pause", lease=300)
    first = len(rollouts.waves) * ROLLOUTS * CONVERSATIONS  # rollouts of their own, 16 streams each
    calls = [asyncio.create_task(stream(first + i)) for i in range(HELD)]
    while held < 20 and time.perf_counter() < end:  # 20 times when all are there
        for path, body in (("/pause", {"lease": 300}), ("/state", {})):
            started = time.perf_counter()
            state = await rollouts.ask(path, **body)
            took = time.perf_counter() - started
            coming, slowest = (coming, max(slowest, took)) if held else (max(coming, took), slowest)
        held += state["held"] == HELD
        await asyncio.sleep(0.1)
    assert held, f"only {state['held']} streams are held"
    started = time.perf_counter()
    await rollouts.ask("/resume", version=0)
    await asyncio.gather(*calls)
    return slowest, coming, time.perf_counter() - started


async def run(options: argparse.Namespace, secret: str, script: Script, ports: dict[str, int], pids: Any) -> bool:
    rollouts, bars, pid = Rollouts(ports["gateway"], secret), [], pids["gateway"]

    async def nobody(conversation: int) -> str:
        return "x"

    def bar(what: str, value: float, least: float = 0.0, most: float = float("inf")) -> None:
        bars.append(least <= value <= most)
        wanted = f"at least {least:g}" if least else f"at most {most:g}"
        print(f"{what:<50} {value:8.2f}   {wanted}{'' if bars[-1] else '   MISSED'}", flush=True)

    gateway, relay = Load(script, ports["gateway"], rollouts.key), Load(script, ports["relay"], nobody)
    memory = {0: memory_mb(pid)}
    rows = await compare({"gateway": gateway, "relay": relay}, pids, options.rounds, options.seconds)
    print(f"{'connections':<12}" + "".join(f"{what:>9}" for what in rows["relay", 1]))
    for (name, level), row in rows.items():
        print(f"{name:<8}{level:>4}" + "".join(f"{value:>9.2f}" for value in row.values()))
    for level in LEVELS:
        bar(f"calls a second of the relay's, {level} connections",
            rows["gateway", level]["calls/s"] / rows["relay", level]["calls/s"], least=0.7)
    bar("p50 at 1 connection, ms", rows["gateway", 1]["p50 ms"], most=3)
    bar("p99 / p50 at 16 connections", rows["gateway", 16]["p99/p50"], most=3)
    for calls in range(gateway.calls, options.calls + 5000, 5000):
        await gateway.measure(16, calls=min(calls, options.calls))
        memory[gateway.calls] = memory_mb(pid)
    print("memory, MB after so many calls: " + ", ".join(f"{mb:.0f} ({calls:,})" for calls, mb in memory.items()))
    bar(f"memory after {gateway.calls:,} calls, MB", memory[gateway.calls], most=150)
    slowest, coming, rest = await hold(gateway, rollouts)
    bar(f"slowest pause or state, {HELD:,} held streams, s", slowest, most=1)
    print(f"slowest while they came {coming:.2f} s; after the resume they took {rest:.1f} s; "
          f"memory then {memory_mb(pid):.0f} MB")
    return all(bars)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds of half a second, 3,000 calls")
    parser.add_argument("--rounds", type=int, default=9, help="of which the median counts")
    parser.add_argument("--seconds", type=float, default=1.0, help="of load for each server and level in a round")
    parser.add_argument("--calls", type=int, default=20_000, help="after which memory is read")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.calls = 3, 0.5, 3_000
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    script, ports = Script(), {name: free_port() for name in ("engine", "relay", "gateway")}
    engine = f"http://127.0.0.1:{ports['engine']}"
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_tokenizer(directory)
        fork = multiprocessing.get_context("fork")
        children = [fork.Process(target=serve_engine, args=(ports["engine"], script, directory), daemon=True),
                    fork.Process(target=serve_relay, args=(ports["relay"], engine, directory), daemon=True)]
        for child in children:
            child.start()
        with open(directory / "stderr", "wb") as stderr:
            gateway = subprocess.Popen(
                [sys.executable, str(ROOT / "gateway.py"), "--run-dir", folder, "--engine-url", engine, "--port",
                 str(ports["gateway"])], stderr=stderr)
        os.sched_setaffinity(gateway.pid, {0})
        os.sched_setaffinity(0, {1})
        for port in ports.values():
            while socket.socket().connect_ex(("127.0.0.1", port)):
                if gateway.poll() is not None:
                    raise SystemExit(f"the gateway did not start:\n{(directory / 'stderr').read_text()}")
                time.sleep(0.05)
        pids = {"gateway": gateway.pid, "relay": children[1].pid}
        try:
            good = uvloop.run(run(options, read_secret(directory / "secret"), script, ports, pids))
        finally:
            gateway.kill()
            for child in children:
                child.kill()
    raise SystemExit(not good)


if __name__ == "__main__":
    main()

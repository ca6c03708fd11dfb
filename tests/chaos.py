"""The engine and the harnesses of test_gateway_chaos.py, each run as a process: it imports little, so it starts fast.

    python tests/chaos.py engine DIRECTORY PORT INCARNATION    python tests/chaos.py harnesses DIRECTORY URL

The engine samples random words, sometimes a character in two ids, for all requests at once, a token a tick. What it
samples goes to DIRECTORY/engine.INCARNATION before it goes to any client: [request, id, log-prob, version, checksum of
all ids up to this one]; no two log-probs are equal. Histories are rendered byte by byte, never as they were sampled.
A harness is a fork of one warm process: a conversation of a few turns on the official client. What it gets, complete,
it appends to DIRECTORY/harness.N.
"""

import asyncio
import gc
import json
import os
import random
import re
import sys
import time
import traceback
import zlib
from array import array
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TICK, TURNS, MEAN, HARNESSES = 0.05, 7, 20, 200  # seconds; turns of a harness; sampled ids of a turn
WORDS, SPLIT = range(256, 1256), "é".encode()
EOS = 1256
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that a byte-level vocabulary writes as themselves
ALPHABET = {byte: chr(byte) for byte in BYTES} | {byte: chr(256 + i) for i, byte in enumerate(
    byte for byte in range(256) if byte not in BYTES)}
ID_OF_BYTE = {byte: at for at, byte in enumerate(sorted(ALPHABET, key=ALPHABET.__getitem__))}
BYTE_OF_ID = {at: byte for byte, at in ID_OF_BYTE.items()}


def make_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    names = [*sorted(ALPHABET.values()), *(f"{ALPHABET[32]}w{i}" for i in WORDS)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))


def text(ids: list[int]) -> str:
    spelled = (b" w%d" % i if i in WORDS else bytes([BYTE_OF_ID[i]]) for i in ids if i != EOS)
    return b"".join(spelled).decode("utf-8", "replace")


def checksum(ids: list[int], before: int = 0) -> int:
    return zlib.crc32(array("i", ids).tobytes(), before)


class Generation:
    def __init__(self, name: str, body: dict[str, Any], client: "Connection") -> None:
        self.name, self.client, self.stream, self.ids = name, client, body["stream"], []
        self.most, self.last = body["sampling_params"]["max_tokens"], body["token_ids"][-1]
        self.checksum, self.logprobs, self.sent = checksum(body["token_ids"]), [], 0


class Engine:
    def __init__(self, directory: Path, incarnation: int) -> None:
        self.directory, self.rng, self.sampled, self.paused = directory, random.Random(incarnation), 0, False
        self.running: list[Generation] = []
        self.log = os.open(directory / f"engine.{incarnation}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.incarnation, self.requests = incarnation, 0
        self.version = int((directory / "version").read_text())

    def sample(self, generation: Generation) -> int:
        if generation.last == ID_OF_BYTE[SPLIT[0]]:
            return ID_OF_BYTE[SPLIT[1]]
        draw = self.rng.random()
        return EOS if draw < 1 / MEAN else ID_OF_BYTE[SPLIT[0]] if draw < 0.15 else self.rng.choice(WORDS)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            self.running = [generation for generation in self.running if generation.client.open]
            lines = []
            for generation in [] if self.paused else self.running:
                token, self.sampled = self.sample(generation), self.sampled + 1
                generation.checksum = checksum([token], generation.checksum)
                generation.logprobs.append(-(self.incarnation * 10**7 + self.sampled) / 2**40)
                generation.ids.append(token)
                generation.last = token
                lines.append([generation.name, token, generation.logprobs[-1], self.version, generation.checksum])
            if lines:
                os.write(self.log, json.dumps(lines).encode() + b"\n")
            for generation in [] if self.paused else self.running[:]:
                full = len(generation.ids) >= generation.most
                self.answer(generation, "stop" if generation.last == EOS else "length" if full else None)

    def answer(self, generation: Generation, finish: str | None) -> None:
        """Sends what is new, or all at the end if the client does not stream."""
        if finish:
            self.running.remove(generation)
        if not generation.stream and not finish:
            return
        ids, logprobs = generation.ids[generation.sent:], generation.logprobs[generation.sent:]
        generation.sent += len(ids)
        spans = [{"version": str(self.version), "start": 0, "end": len(generation.ids)}] if finish else None
        reply = json.dumps({"choices": [{
            "index": 0, "token_ids": ids, "finish_reason": finish, "weight_versions": spans,
            "logprobs": {"content": [{"token_id": i, "logprob": p} for i, p in zip(ids, logprobs, strict=True)]}}]})
        if generation.stream:
            generation.client.chunk(f"data: {reply}\n\n".encode())
            if finish:
                generation.client.chunk(b"data: [DONE]\n\n")
                generation.client.chunk(b"")
        else:
            generation.client.send(reply.encode())

    def handle(self, path: str, body: Any, client: "Connection") -> None:
        if path == "/v1/models":
            client.send_json({"data": [{"id": "chaos", "root": str(self.directory), "max_model_len": 100_000}]})
        elif path.endswith("/derender"):
            ids = body["generate_response"]["choices"][0]["token_ids"]
            client.send_json({"choices": [{"index": 0, "message": {"role": "assistant", "content": text(ids)}}]})
        elif path.endswith("/render"):
            ids = []
            for message in body["messages"]:
                ids += [ID_OF_BYTE[byte] for byte in f"{message['role']}:{message['content']}".encode()] + [EOS]
            ids += [ID_OF_BYTE[byte] for byte in b"assistant:"]
            client.send_json({"token_ids": ids, "sampling_params": {"stop_token_ids": [EOS]}})
        elif path.endswith("/generate"):
            self.requests += 1
            generation = Generation(f"{self.incarnation}.{self.requests}", body, client)
            kind = [generation.name, generation.stream, time.monotonic()]
            os.write(self.log, json.dumps(kind).encode() + b"\n")
            self.running.append(generation)
            if generation.stream:
                client.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                                       b"transfer-encoding: chunked\r\n\r\n")
        else:
            if path.startswith("/pause"):
                self.paused = True
                for generation in self.running[:]:
                    self.answer(generation, "abort")
            elif path == "/resume":
                self.paused = False
            else:
                self.version = int(body["new_version"])
            client.send_json({})


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self.engine, self.buffer, self.open = engine, b"", True

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (start := self.buffer.find(b"\r\n\r\n") + 4) > 3:
            length = re.search(rb"(?i)content-length: (\d+)", self.buffer[:start])
            end = start + int(length[1]) if length else start
            if len(self.buffer) < end:
                return
            path, body = self.buffer.split(b" ", 2)[1].decode(), self.buffer[start:end]
            self.buffer = self.buffer[end:]
            self.engine.handle(path, json.loads(body) if body else None, self)

    def send_json(self, reply: Any) -> None:
        self.send(json.dumps(reply).encode())

    def send(self, reply: bytes) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
            len(reply), reply))

    def chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


async def serve(directory: Path, port: int, incarnation: int) -> None:
    engine = Engine(directory, incarnation)
    await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=1000)
    await engine.run()


def harness(number: int, directory: Path, client: Any) -> None:
    """Every second one streams. A stream that breaks is asked for again, in the same words."""
    import httpx
    import openai

    rng, stream = random.Random(number), bool(number % 2)
    messages = [{"role": "system", "content": "chaos"}, {"role": "user", "content": f"I am {number}."}]
    with open(directory / f"harness.{number}", "w", buffering=1) as log:
        for turn in range(TURNS):
            time.sleep(3 * rng.random())
            while True:
                try:
                    reply = client.chat.completions.create(model="m", messages=messages, stream=stream)
                    if stream:
                        chunks = list(reply)
                        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                        finish, name = chunks[-1].choices[0].finish_reason, {chunk.id for chunk in chunks}
                        assert finish and len(name) == 1
                    else:
                        choice, name = reply.choices[0], {reply.id}
                        said, finish = choice.message.content, choice.finish_reason
                    break
                except (httpx.TransportError, openai.APIConnectionError):
                    if not stream:  # the client itself tries again, often enough
                        raise
                    time.sleep(0.2)
            log.write(json.dumps({"turn": turn, "name": name.pop(), "said": said, "finish": finish}) + "\n")
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"Turn {turn} é"}]


def harnesses(directory: Path, url: str) -> None:
    import ssl

    import httpx
    import openai

    keys = json.loads((directory / "keys").read_text())
    http = httpx.Client(verify=ssl.create_default_context(), trust_env=False)
    client = openai.OpenAI(base_url=url + "/v1", api_key="x", http_client=http, max_retries=50, timeout=120)
    client.chat.completions  # noqa: B018  imported once for all
    gc.collect()
    gc.freeze()
    children = []
    for number, key in enumerate(keys):
        if not (child := os.fork()):
            try:
                harness(number, directory, client.with_options(api_key=key))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        asyncio.run(serve(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
    harnesses(Path(sys.argv[2]), sys.argv[3])

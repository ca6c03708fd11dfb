"""Nothing is lost: 200 harness processes, while gateway and engine are killed at random and the trainer pauses them.

At the end each harness has every reply exactly once, and the store holds what the engine sampled, token for token.
"""

import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chaos
import httpx
import pytest
from test_gateway import Server

import trajectory

SECONDS = 35  # of trouble; then all may end


class Cluster:
    """Gateway, engine and trainer. All but the harnesses, and all but well."""

    def __init__(self, directory: Path) -> None:
        chaos.make_tokenizer(directory)
        (directory / "version").write_text("0")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.directory, self.incarnation, self.happened = directory, 0, Counter()
        self.start_engine()
        self.gateway = Server(directory, f"http://127.0.0.1:{self.port}", "--engine-retry", "60", "--keepalive", "1",
                              process=True)
        self.gateway_since, self.deaths, self.over, self.rng = time.monotonic(), [], threading.Event(), random.Random(1)

    def start_engine(self) -> None:
        self.engine = subprocess.Popen([sys.executable, chaos.__file__, "engine", str(self.directory), str(self.port),
                                        str(self.incarnation)])

    def kill_engine(self) -> None:
        self.engine.kill()
        self.engine.wait()
        self.deaths.append(self.incarnation)
        self.incarnation += 1
        time.sleep(self.rng.uniform(0, 1))
        self.start_engine()

    def kill_gateway(self) -> None:
        self.gateway.kill()
        time.sleep(self.rng.uniform(0, 1))
        self.gateway.start()
        self.gateway_since = time.monotonic()

    def trouble(self) -> None:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(self.rng.uniform(1, 4))
            event = self.rng.choice([self.kill_engine, self.kill_gateway])
            event()
            self.happened[event.__name__] += 1

    def insist(self, method: str, url: str, **body: Any) -> Any:
        """What the trainer wants of a server that may be dead."""
        while not self.over.is_set():
            try:
                reply = self.gateway.admin.request(method, url, json=body or None)
                if reply.status_code == 200:
                    return reply.json()
            except httpx.TransportError:
                time.sleep(0.1)

    def train(self) -> None:
        """Pauses, as vllm_control and the trainer do."""
        engine = f"http://127.0.0.1:{self.port}"
        for version in range(1, 1000):
            if self.over.wait(2.5):
                return
            self.insist("POST", "/pause", lease=60)
            self.insist("POST", f"{engine}/pause?mode=abort")
            while not self.over.is_set() and self.insist("GET", "/state")["in_flight"]:
                time.sleep(0.05)
            (self.directory / "version").write_text(str(version))  # which an engine has that is started now
            self.insist("POST", f"{engine}/update_weight_version", new_version=str(version))
            self.insist("POST", f"{engine}/resume")
            self.insist("POST", "/resume", version=version)
            self.happened["pause"] += 1


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.over.set()
    cluster.gateway.kill()
    cluster.engine.kill()
    cluster.engine.wait()


def sampled(directory: Path) -> tuple[dict[float, tuple], dict[str, tuple[bool, float]], dict[int, set[float]]]:
    """What the engines wrote: {log-prob: (request, id, version, checksum)}, {request: (streamed, since)}, and by
    incarnation the log-probs of the last tick, which may not have left a killed engine."""
    tokens, requests, last = {}, {}, {}
    for path in sorted(directory.glob("engine.*")):
        for line in path.read_text().splitlines():
            if isinstance((record := json.loads(line))[0], str):
                requests[record[0]] = tuple(record[1:])
                continue
            last[int(path.suffix[1:])] = {logprob for _, _, logprob, _, _ in record}
            for request, token, logprob, version, checksum in record:
                assert logprob not in tokens
                tokens[logprob] = request, token, version, checksum
    return tokens, requests, last


@pytest.mark.slow
def test_nothing_is_lost(cluster: Cluster) -> None:
    rollouts = cluster.gateway.run("chaos", n=chaos.HARNESSES, sampling={"max_tokens": 400})
    (cluster.directory / "keys").write_text(json.dumps([rollout["agent_key"] for rollout in rollouts]))
    command = [sys.executable, chaos.__file__, "harnesses", str(cluster.directory), cluster.gateway.url]
    harnesses = subprocess.Popen(command)
    threads = [threading.Thread(target=target) for target in (cluster.trouble, cluster.train)]
    try:
        for thread in threads:
            thread.start()
        threads[0].join()
        assert harnesses.wait(240) == 0
    finally:
        cluster.over.set()
        harnesses.kill()
        threads[1].join()
    assert cluster.happened["kill_engine"] >= 2 <= cluster.happened["kill_gateway"] and cluster.happened["pause"] >= 3
    tokens, requests, last = sampled(cluster.directory)
    stored, pieces = set(), Counter()
    for number, rollout in enumerate(rollouts):
        got = [json.loads(line) for line in (cluster.directory / f"harness.{number}").read_text().splitlines()]
        turns = cluster.gateway.turns(rollout["id"])
        assert [reply["turn"] for reply in got] == list(range(chaos.TURNS))
        assert [turn["message"]["content"] or "" for turn in turns] == [reply["said"] for reply in got], turns
        assert {turn["status"] for turn in turns} <= {"ok", "delivered"}
        for turn in turns:
            check_tokens(turn, tokens)
            assert not stored & set(turn["logprobs"]) and len(set(turn["logprobs"])) == len(turn["logprobs"])
            stored |= set(turn["logprobs"])
            pieces[len({tokens[logprob][0] for logprob in turn["logprobs"]}) > 1, len(set(turn["versions"])) > 1] += 1
            assert chaos.text(turn["response_ids"]) == (turn["message"]["content"] or "")
        rows, _ = trajectory.assemble([trajectory.Turn.from_record(turn) for turn in turns])
        assert [row.trained_tokens for row in rows] == [sum(len(turn["response_ids"]) for turn in turns)]
    assert pieces[True, False] + pieces[True, True] > 20, f"the trouble hardly met a call: {pieces}, {cluster.happened}"
    # What the engine sampled for the last gateway is there, but for what a killed engine may not have sent.
    unsent = set().union(*(last.get(incarnation, set()) for incarnation in cluster.deaths))
    for logprob, (request, *_) in tokens.items():
        streamed, since = requests[request]
        if since > cluster.gateway_since and logprob not in unsent:
            if streamed or int(request.split(".")[0]) not in cluster.deaths:
                assert logprob in stored, (request, logprob)


def check_tokens(turn: dict, tokens: dict[float, tuple]) -> None:
    """Each id of the turn was sampled, with this log-prob, by this version, after just these ids."""
    before = chaos.checksum(turn["prompt_ids"])
    for token, logprob, version in zip(turn["response_ids"], turn["logprobs"], turn["versions"], strict=True):
        before = chaos.checksum([token], before)
        assert tokens[logprob][1:] == (token, version, before), turn

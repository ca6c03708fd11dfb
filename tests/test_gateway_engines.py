"""A gateway before several engines: a rollout stays with one, and an engine that is gone takes only its own with it."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_gateway import ScriptedEngine, Server, ask, sdk


def asked(engine: ScriptedEngine) -> Counter:
    """How often each first message came."""
    texts = ("".join(chr(token - 1000) for token in body["token_ids"] if token >= 1000) for body in engine.seen)
    return Counter(text.partition(";")[0].removeprefix("u:") for text in texts)


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    engines = [ScriptedEngine() for _ in range(3)]
    yield engines
    for engine in engines:
        engine.stop()


@pytest.fixture
def server(tmp_path: Path, engines: list[ScriptedEngine]) -> Iterator[Server]:
    server = Server(tmp_path, ",".join(f"http://127.0.0.1:{engine.port}/" for engine in engines), engine_retry=1)
    yield server
    server.kill()


def test_a_rollout_stays_with_one_engine_and_rollouts_are_spread(server: Server, engines: list[ScriptedEngine]) -> None:
    rollouts = server.run("g", n=6)
    for turn in range(4):
        for rollout in rollouts:
            ask(sdk(server, rollout["agent_key"]), rollout["id"], *[f"more {i}" for i in range(turn)])
    assert [sorted(asked(engine).values()) for engine in engines] == [[4, 4]] * 3  # two rollouts each, all of their turns


def test_an_engine_that_is_gone_takes_only_its_own_rollouts(server: Server, engines: list[ScriptedEngine]) -> None:
    rollouts = server.run("g", n=3)
    for rollout in rollouts:
        ask(sdk(server, rollout["agent_key"]), rollout["id"])
    lost = asked(engines[0])
    assert len(lost) == 1
    port = engines[0].port
    engines[0].stop()
    for rollout in rollouts:
        reply = server.client(rollout["agent_key"]).post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert reply.status_code == (503 if rollout["id"] in lost else 200), reply.text
    engines[0] = ScriptedEngine(port)  # started again at its address
    for rollout in rollouts:
        ask(sdk(server, rollout["agent_key"]), "again")

"""Agents as released, unmodified, pointed at the gateway as their own documentation says, each doing a scripted task.

The engine samples what the script says (tests/scripted_engine.py), in ids that no tokenizer would choose, so that only
the gateway's splice can keep a conversation in one row. Meanwhile a "trainer" updates the weights every moment: calls
are held, generations are aborted and continued, and where an agent's idle time-out can be set low, the first update
takes longer than that. At the end the workspace is as scripted, the main conversation is one row, a side conversation
(title, sub-agent) another, and every id that the engine sampled is trained exactly once, with its log-prob and version.

    tokens     the chat template gives the text of the replies again
    messages   it does not: they leave an empty line before a call, as Qwen's models do, or the agent forgets a thought

`make test` installs the agents (package.json, requirements.txt) into .harness; without it: skipped, in CI failed.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import httpx
import pytest

import trajectory
from tests.scripted_engine import HEADER, Scripted
from tests.test_gateway import Server

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = ROOT / ".harness"
NODE, PYTHON = INSTALLED / "node_modules/.bin", INSTALLED / "python/bin"
CODE = "print('naïve 漢字 🙂', sum(range(10)))\n"
RUN, OUTPUT = "python3 hello.py > out.txt", "naïve 漢字 🙂 45\n"
HEREDOC = f"cat > hello.py <<'END'\n{CODE}END"
TASK = "Write hello.py, run it into out.txt and show me: «ünïcode» ✓."
IDLE, HOLD = "1500", 3.0  # milliseconds without an event after which an agent gives up, seconds of a longer update
Call = tuple[str, dict]


@dataclass
class Harness:
    """$URL, $KEY, $WORK (its directory), $HOME and $HERE (this file's directory) are filled in everywhere."""

    command: list[str]
    env: dict[str, str]
    steps: list[list[Call]]  # the calls of each reply of the main conversation; a last reply follows, without calls
    main: str = TASK  # what only the prompts of the main conversation hold
    sides: int = 0  # other conversations
    hold: float = 0.2  # seconds of the first update
    forgets: bool = False  # its history loses what was thought: not echoed, or gone behind a later user message
    files: dict[str, str] = field(default_factory=dict)


CLAUDE = {"ANTHROPIC_BASE_URL": "$URL", "ANTHROPIC_API_KEY": "$KEY", "ANTHROPIC_MODEL": "policy",
          "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}
OPENAI = {"OPENAI_BASE_URL": "$URL/v1", "OPENAI_API_KEY": "$KEY"}
CODEX = f"""\
model = "policy"
model_provider = "gateway"
check_for_update_on_startup = false
[model_providers.gateway]
name = "gateway"
base_url = "$URL/v1"
env_key = "GATEWAY_KEY"
wire_api = "responses"
stream_idle_timeout_ms = {IDLE}
[analytics]
enabled = false
"""
OPENCODE = json.dumps({"model": "gateway/policy", "autoupdate": False, "provider": {"gateway": {
    "npm": "@ai-sdk/openai-compatible", "models": {"policy": {"name": "policy"}},
    "options": {"baseURL": "$URL/v1", "apiKey": "{env:GATEWAY_KEY}", "chunkTimeout": int(IDLE)}}}})
CODEX_COMMAND = [f"{NODE}/codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
CLAUDE_STEPS: list[list[Call]] = [
    [("Write", {"file_path": "$WORK/hello.py", "content": CODE})], [("Bash", {"command": RUN, "description": "Run"})],
    [("Read", {"file_path": "$WORK/out.txt"}), ("Bash", {"command": "ls"})]]
OPENAI_AGENTS_STEPS: list[list[Call]] = [
    [("write_file", {"path": "hello.py", "content": CODE})], [("shell", {"command": RUN})],
    [("shell", {"command": "cat out.txt"}), ("shell", {"command": "ls"})]]

HARNESSES = {
    "claude-code": Harness(
        [f"{NODE}/claude", "-p", TASK, "--allowedTools", "Bash,Write,Read,Agent"], CLAUDE,
        [*CLAUDE_STEPS, [("ToolSearch", {"query": "select:WebFetch,NotebookEdit", "max_results": 2})],
         [("Agent", {"description": "Greet", "prompt": "Say hello.", "subagent_type": "general-purpose",
                     "run_in_background": False})]], sides=1),
    "claude-agent-sdk": Harness(
        [f"{PYTHON}/python", "$HERE/claude_sdk.py", TASK], CLAUDE,
        [*CLAUDE_STEPS, [("ToolSearch", {"query": "select:mcp__own__greet"})], [("mcp__own__greet", {"name": "Zoë"})]]),
    "codex": Harness(
        [*CODEX_COMMAND, TASK], {"CODEX_HOME": "$HOME/.codex", "GATEWAY_KEY": "$KEY"},
        [[("exec_command", {"cmd": HEREDOC})], [("exec_command", {"cmd": RUN})],
         [("exec_command", {"cmd": "cat out.txt"}), ("exec_command", {"cmd": "ls"})],
         [("multi_agent_v1__spawn_agent", {"message": "Say hello."})], [("exec_command", {"cmd": "sleep 1"})]],
        sides=1, forgets=True, hold=HOLD, files={"$HOME/.codex/config.toml": CODEX}),
    "codex-custom-tool": Harness(
        [*CODEX_COMMAND, "-m", "gpt-5.5", TASK], {"CODEX_HOME": "$HOME/.codex", "GATEWAY_KEY": "$KEY"},
        [[("apply_patch", {"input": f"*** Begin Patch\n*** Add File: hello.py\n+{CODE}*** End Patch"})],
         [("exec_command", {"cmd": RUN})], [("exec_command", {"cmd": "cat out.txt"}), ("exec_command", {"cmd": "ls"})]],
        files={"$HOME/.codex/config.toml": CODEX}),
    "qwen-code": Harness(
        [f"{NODE}/qwen", "--auth-type", "openai", "-p", TASK, "--yolo"],
        {**OPENAI, "OPENAI_MODEL": "policy", "QWEN_STREAM_IDLE_TIMEOUT_MS": IDLE},
        [[("write_file", {"file_path": "$WORK/hello.py", "content": CODE})],
         [("run_shell_command", {"command": RUN, "is_background": False})],
         [("read_file", {"file_path": "$WORK/out.txt"}), ("run_shell_command", {"command": "ls"})]],
        hold=HOLD, files={"$HOME/.qwen/settings.json": '{"privacy": {"usageStatisticsEnabled": false}}'}),
    "opencode": Harness(
        [f"{NODE}/opencode", "run", TASK], {"GATEWAY_KEY": "$KEY", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        [[("write", {"filePath": "$WORK/hello.py", "content": CODE})],
         [("bash", {"command": RUN, "description": "Run"})],
         [("read", {"filePath": "$WORK/out.txt"}), ("bash", {"command": "ls", "description": "List"})]],
        main="You are opencode", sides=1, hold=HOLD, files={"$WORK/opencode.json": OPENCODE}),
    "mini-swe-agent": Harness(
        [f"{PYTHON}/mini", "-m", "openai/policy", "-y", "--exit-immediately", "-c", "mini.yaml", "-t", TASK],
        {"OPENAI_API_BASE": "$URL/v1", "OPENAI_API_KEY": "$KEY", "MSWEA_CONFIGURED": "true",
         "MSWEA_COST_TRACKING": "ignore_errors", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        [[("bash", {"command": HEREDOC})], [("bash", {"command": RUN})],
         [("bash", {"command": "cat out.txt"}), ("bash", {"command": "ls"})],
         [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})]]),
    **{f"openai-agents-{api}-{how}": Harness(
        [f"{PYTHON}/python", "$HERE/openai_agents.py", api, how, TASK],
        {**OPENAI, "OPENAI_AGENTS_DISABLE_TRACING": "1"}, OPENAI_AGENTS_STEPS, forgets=api != "responses")
       for api, how in (("chat_completions", "plain"), ("responses", "stream"))},
}


def script(harness: Harness, mode: str, work: Path) -> list[str]:
    """The texts of the main conversation's replies."""
    replies = []
    for number, calls in enumerate([*harness.steps, []]):
        thought = f"<think>\nStep {number}: what next? 考える 🤔\n</think>\n\n"
        thought = "" if harness.forgets and mode == "tokens" else thought
        text = "It is done: naïve ✓ 漢字 🙂" if not calls else f"Step {number}, ça va 🙂" if number != 1 else ""
        made = [{"name": name, "arguments": filled(arguments, WORK=str(work))} for name, arguments in calls]
        said = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in made]
        between = ("\n\n" if mode == "messages" else "\n") if text and calls else ""
        replies.append(thought + text + between + "\n".join(said))
    return replies


def filled(value: Any, **names: str) -> Any:
    """`value` with every $NAME in its strings replaced."""
    if isinstance(value, dict):
        return {Template(key).safe_substitute(names): filled(one, **names) for key, one in value.items()}
    if isinstance(value, list):
        return [filled(one, **names) for one in value]
    return Template(value).safe_substitute(names) if isinstance(value, str) else value


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    if not (INSTALLED / ".done").exists():
        reason = "the agents are not installed (make .harness/.done; it needs npm)"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with Scripted(tmp_path_factory.mktemp("engine"), lambda prompt: "", delay=0.001) as engine:
        yield engine


@pytest.fixture(scope="module", params=["tokens", "messages"])
def served(request: pytest.FixtureRequest, engine: Scripted, tmp_path_factory: pytest.TempPathFactory
           ) -> Iterator[tuple[str, Server]]:
    server = Server(tmp_path_factory.mktemp(request.param), engine.url, "--history", request.param, "--tokenizer",
                    str(engine.tokenizer_dir), "--keepalive", "0.2", process=True)
    yield request.param, server
    server.kill()


@contextlib.contextmanager
def beside(function: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """Runs `function` in a thread; the event that it gets last says that it should end."""
    over = threading.Event()
    thread = threading.Thread(target=function, args=(*arguments, over))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def update_weights(server: Server, engine: Scripted, hold: float, over: threading.Event) -> None:
    """From the first token on: hold the calls, abort what is being sampled, wait, a new weight version, go on."""
    client, version = httpx.Client(base_url=engine.url, trust_env=False), int(engine.engine.version)
    while not engine.engine.sampled and not over.wait(0.01):
        pass
    for seconds in itertools.chain([hold], itertools.repeat(0.2)):
        server.post("/pause", lease=60)
        client.post("/pause?mode=abort").raise_for_status()
        time.sleep(seconds)
        version += 1
        client.post("/update_weight_version", json={"new_version": str(version)}).raise_for_status()
        client.post("/resume").raise_for_status()
        server.post("/resume", version=version)
        if over.wait(0.3):
            return


def kill_gateway(server: Server, engine: Scripted, over: threading.Event) -> None:
    """In the middle of the second reply, or so."""
    while len(engine.engine.sampled) < 160 and not over.wait(0.005):
        pass
    server.kill()
    time.sleep(0.5)
    server.start()


def run(harness: Harness, key: str, url: str, work: Path, home: Path) -> None:
    names = {"URL": url, "KEY": key, "WORK": str(work), "HOME": str(home), "HERE": str(Path(__file__).parent)}
    for path, text in filled(harness.files, **names).items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    # Nothing of this environment, and no other host: what an agent would like to tell or fetch there, it cannot.
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", "TERM": "dumb",
           "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost"} | filled(harness.env, **names)
    with open(home / "output", "w+") as output:
        agent = subprocess.Popen(filled(harness.command, **names), cwd=work, env=env, stdin=subprocess.DEVNULL,
                                 stdout=output, stderr=output, start_new_session=True)
        try:
            status = agent.wait(120)
        finally:
            with contextlib.suppress(ProcessLookupError):  # with all that it has started
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    assert status == 0, (home / "output").read_text()


Token = tuple[float, int, int]  # log-prob, id, weight version


def play(name: str, served: tuple[str, Server], engine: Scripted, place: Path, meanwhile: Callable[..., None],
         *arguments: Any) -> tuple[list[Token], list[Token]]:
    """Plays the script through and checks all but the tokens: what the engine sampled, and what would be trained."""
    (mode, server), harness, work, home = served, HARNESSES[name], place / "work", place / "home"
    work.mkdir(), home.mkdir()
    replies = script(harness, mode, work)

    def say(prompt: str) -> str:
        return replies[prompt.count(HEADER) - 1] if harness.main in prompt else "Ünïcode title 漢字"

    engine.engine.say, engine.engine.sampled = say, []
    (rollout,) = server.run(f"{name}_{meanwhile.__name__}".replace("-", "_"))
    with beside(meanwhile, server, engine, *arguments):
        run(harness, rollout["agent_key"], server.url, work, home)
    assert (work / "hello.py").read_text() == CODE and (work / "out.txt").read_text() == OUTPUT

    records = server.turns(rollout["id"])
    turns = [trajectory.Turn.from_record(record) for record in records]
    main = [at for at, turn in enumerate(turns) if harness.main in engine.tokenizer.decode(turn.prompt_ids)]
    said = [engine.tokenizer.decode(turns[at].response_ids).removesuffix("<|im_end|>") for at in main]
    assert said == replies[:len(said)] and len(said) >= len(harness.steps)
    rows, counts = trajectory.assemble(turns)
    assert [row.turns for row in rows if main[0] in row.turns] == [main], [record["fork"] for record in records]
    assert len(rows) == 1 + harness.sides and not counts["undelivered"]
    trained = [one[:3] for row in rows for one in zip(row.logprobs, row.ids, row.versions, row.mask) if one[3]]
    return [(logprob, token, int(version)) for logprob, token, version in engine.engine.sampled], trained


@pytest.mark.parametrize("name", HARNESSES)
def test_one_row_and_nothing_lost(name: str, served: tuple[str, Server], engine: Scripted, tmp_path: Path) -> None:
    sampled, trained = play(name, served, engine, tmp_path, update_weights, HARNESSES[name].hold)
    assert sorted(trained) == sorted(sampled)
    assert len({version for *_, version in trained}) > 1


@pytest.mark.parametrize("served", ["tokens"], indirect=True)
@pytest.mark.parametrize("name", ["claude-code", "codex"])
def test_a_killed_gateway(name: str, served: tuple[str, Server], engine: Scripted, tmp_path: Path) -> None:
    """Agents wait and ask again. What it was sampling is sampled again, and trained once."""
    sampled, trained = play(name, served, engine, tmp_path, kill_gateway)
    assert set(trained) < set(sampled) and len(trained) == len(set(trained))

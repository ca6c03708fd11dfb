"""Harness adapters and verifiers: what runs inside a rollout. Imports nothing of ours and knows nothing of training.

A harness is `harness(task, workdir)`: it gets the task's `agent` part, finds its model in `OPENAI_BASE_URL`,
`OPENAI_API_KEY` and `MODEL_NAME`, leaves its result in `workdir/result/`, and fails by raising. A verifier is
`verify(task, workdir, turns)`: it runs in another process once the harness is dead, sees the task's `verifier` part
too, and returns the reward.

Search: the model asks a `search` tool (retrieval over HTTP) until it answers with a last line "Answer: ...". Reward is
exact match after Search-R1's normalization (arXiv 2503.09516), with F1 as a metric.

Code: the harness leaves a patch (`leave_patch`), which `verify_patch` applies to a clean checkout if no rule refuses
it; then it runs the named tests in the controller's sandbox. Tests and their configuration stay the original's.
"""

import json
import os
import re
import shutil
import string
import subprocess
import sys
import tomllib
import urllib.request
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

# ----------------------------------------------------------------------------------------------------------- search

SEARCH_SYSTEM = "Search for facts. End with a line \"Answer: ...\"."
SEARCH_TOOL = {"type": "function", "function": {"name": "search", "parameters": {
    "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}


def show_results(results: list[dict[str, str]]) -> str:
    """What the model reads of the documents found."""
    return "\n".join(f"- {result['title']}: {result['text']}" for result in results) or "Nothing found."


def run_search(url: str, query: str, k: int) -> list[dict[str, str]]:
    """Ask the retrieval server: POST {"query", "k"} -> {"results": [{"title", "text"}]}."""
    body = json.dumps({"query": query, "k": k}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.loads(response.read())["results"]


def search_call(name: str, arguments: str, url: str, k: int) -> str:
    """One call of the tool; a call the model got wrong is answered with what is wrong, as a tool should."""
    if name != SEARCH_TOOL["function"]["name"]:
        return f"Error: there is no tool {name}."
    try:
        query = json.loads(arguments)["query"]
    except (ValueError, KeyError, TypeError):
        return 'Error: search takes {"query": "..."}.'
    return show_results(run_search(url, str(query), k))


def search_agent(task: dict, workdir: Path) -> None:
    """A multi-turn search agent on the openai client; the reply without a call is the answer.

    task: {"question", "search_url", "max_turns": 4, "results_per_search": 1}; `max_turns` counts model calls.
    """
    from openai import OpenAI  # a preloaded controller has it already

    client, model = OpenAI(), os.environ["MODEL_NAME"]
    messages = [{"role": "system", "content": SEARCH_SYSTEM}, {"role": "user", "content": task["question"]}]
    answer = ""
    for _ in range(task.get("max_turns", 4)):
        reply = client.chat.completions.create(model=model, messages=messages, tools=[SEARCH_TOOL]).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            answer = reply.content or ""
            break
        for call in reply.tool_calls:
            content = search_call(call.function.name, call.function.arguments, task["search_url"],
                                  task.get("results_per_search", 1))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    (workdir / "result" / "answer.txt").write_text(answer, encoding="utf-8", errors="replace")


def final_answer(text: str) -> str:
    """What stands after the last "Answer:", else nothing: an answer out of form is not one."""
    return text.rpartition("Answer:")[2].strip() if "Answer:" in text else ""


def normalize(text: str) -> str:
    """Search-R1's normalization: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, golds: list[str]) -> float:
    return float(any(normalize(answer) == normalize(gold) for gold in golds))


def f1(answer: str, golds: list[str]) -> float:
    """The best token F1 over the accepted answers."""
    best, got = 0.0, normalize(answer).split()
    for gold in (normalize(g).split() for g in golds):
        same = sum((Counter(got) & Counter(gold)).values())
        best = max(best, 2 * same / (len(got) + len(gold)) if same else 0.0)
    return best


def verify_search(task: dict, workdir: Path, turns: list[dict]) -> dict[str, float]:
    """Exact match of the final answer with any of `task["verifier"]["answers"]`; no result file is an empty answer."""
    path, golds = workdir / "result" / "answer.txt", task["verifier"]["answers"]
    answer = final_answer(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else ""
    em = exact_match(answer, golds)
    return {"reward": em, "exact_match": em, "f1": f1(answer, golds), "turns": float(len(turns))}


# ------------------------------------------------------------------------------- code: a patch, graded in a clean room

MAX_PATCH_BYTES = 2**20
TEST = re.compile(r"(.*/)?(tests?(/.*)?|test_[^/]*\.py|[^/]*_test\.py)")
CONFIGURATION = re.compile(r"(.*/)?(conftest\.py|\.?pytest\.ini|tox\.ini|setup\.cfg|\.gitattributes|\.gitmodules)")
START_UP = re.compile(r"(.*/)?((site|user)customize\.py|pyvenv\.cfg|__pycache__(/.*)?|[^/]*\.(egg|dist)-info(/.*)?|"
                      r"[^/]*\.(pth|pyc|pyo|so|egg-link))")
SHADOWED = sys.stdlib_module_names | {"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py"}
# Runs pytest in the sandbox. Its results go, each with a word that was read from standard input, to a file without a
# name. -I: nothing of the tree is imported before pytest is.
RUN_TESTS = """import os, sys, pytest
channel, *arguments = sys.argv[1:]
os.set_inheritable(int(channel), False)
class Results:
    word = sys.stdin.readline().strip()
    def pytest_runtest_logreport(self, report):
        os.write(int(channel), f"{self.word} {report.when} {report.outcome} {report.nodeid}\\n".encode())
sys.path.insert(0, os.getcwd())
sys.exit(pytest.main(["-p", "no:cacheprovider", "--rootdir", ".", *arguments], plugins=[Results()]))"""


class Refused(Exception):
    """The reason, in one word, and the details: such a patch is not run, its reward is 0."""


def sandboxed(*read_only: Path) -> list[str]:
    """Begins a command that runs what a model wrote: without network, and of our files the working directory is all
    that it sees and, but for `read_only`, writes. Empty where the controller has no sandbox, or a container is one."""
    walls = json.loads(os.environ.get("HARNESSED_SANDBOX", "[]"))
    return [*walls, *(part for path in read_only for part in ("--ro-bind", path, path))] if walls else []


def git(directory: Path, *arguments: str, input: bytes = b"") -> str:
    """What it prints. Only the repository itself configures it, and no hook runs."""
    env = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "safe.directory=*", "-c", "core.hooksPath=/dev/null", *arguments]
    done = subprocess.run(command, cwd=directory, env=env, check=True, capture_output=True, input=input)
    return done.stdout.decode(errors="surrogateescape")


def leave_patch(repo: Path, result: Path, base: str, allowed: Sequence[str] = (".",)) -> None:
    """In the harness: result/patch.diff has what changed in `repo` since the commit `base` in the `allowed` paths. In
    the sandbox, since the repository is the agent's, and its configuration may have git run anything."""
    if result.is_symlink():
        raise Refused(f"path: {result} is a link")
    path = result / "patch.diff"
    path.unlink(missing_ok=True)
    with path.open("xb") as patch:
        for command in (["add", "--all"], ["diff", "--cached", "--no-renames", "--no-ext-diff", base, "--", *allowed,
                                           ":(exclude,glob)**/__pycache__/**", ":(exclude,glob)**/.pytest_cache/**"]):
            subprocess.run([*sandboxed(), "git", "-C", repo, *command], stdout=patch, check=True)


def read_patch(path: Path) -> bytes:
    if path.parent.is_symlink() or path.is_symlink() or not path.is_file():
        raise Refused("path: result/patch.diff is not a regular file")
    if path.stat().st_size > MAX_PATCH_BYTES:
        raise Refused(f"size: {path.stat().st_size} bytes")
    patch = path.read_bytes()
    if b"\0" in patch or re.search(rb"^GIT binary patch", patch, re.M):
        raise Refused("binary: not only text")
    return patch


def check_change(path: str, added: bool, originals: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises Refused if a patch may not touch this file."""
    inside, here = path.removeprefix("src/").split("/")[0], {o.removeprefix("src/").split("/")[0] for o in originals}
    for reason, broken in (
            ("tests", TEST.fullmatch(path)), ("configuration", CONFIGURATION.fullmatch(path)),
            ("start", START_UP.fullmatch(path)),
            ("shadow", added and inside not in here and inside.partition(".")[0] in SHADOWED),
            ("path", not any(fnmatch(path, pattern) for pattern in allowed))):
        if broken:
            raise Refused(f"{reason}: {path}")


def pytest_section(tree: Path, commit: str) -> Any:
    """Of pyproject.toml in a commit, or in the index (""); None if there is none."""
    try:
        return tomllib.loads(git(tree, "show", f"{commit}:pyproject.toml")).get("tool", {}).get("pytest")
    except subprocess.CalledProcessError:
        return None
    except ValueError as error:
        raise Refused(f"configuration: pyproject.toml: {error}") from None


def clean_checkout(verifier: dict, patch: bytes, tree: Path) -> list[Path]:
    """Checks the repository out with the patch, unless a rule refuses it. -> the tests and their configuration"""
    base = verifier.get("base", "HEAD")
    git(tree.parent, "clone", "--quiet", "--shared", "--no-checkout", verifier["repo"], str(tree))
    git(tree, "read-tree", base)
    originals = git(tree, "ls-files", "-z").split("\0")
    try:
        if patch:
            git(tree, "apply", "--cached", "--whitespace=nowarn", "-", input=patch)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise Refused(f"{'path' if 'invalid path' in said or 'beyond a' in said else 'apply'}: {said}") from None
    changes = git(tree, "diff", "--cached", "--name-status", "--no-renames", "-z", base).split("\0")[:-1]
    for status, path in zip(changes[::2], changes[1::2], strict=True):
        check_change(path, status == "A", originals, verifier.get("allowed", ["*"]))
    if pytest_section(tree, base) != pytest_section(tree, ""):
        raise Refused("configuration: the pytest section of pyproject.toml")
    git(tree, "apply", "--cached", "--allow-empty", "-", input=verifier.get("test_patch", "").encode())
    git(tree, "checkout-index", "--all")
    files = git(tree, "ls-files", "-z").split("\0")[:-1]
    shutil.rmtree(tree / ".git")  # of its history, tests need nothing, and a cheat perhaps the solution
    for path in changes[1::2]:
        if not os.path.realpath(tree / path).startswith(f"{os.path.realpath(tree)}/"):
            raise Refused(f"link: {path} leads out of the tree")
    tops = {re.match(r"(.*?/)?tests?(?=/)|.*", path).group() for path in files if
            TEST.fullmatch(path) or CONFIGURATION.fullmatch(path) or path == "pyproject.toml"}
    return [tree / top for top in sorted(tops)]


def run_tests(tree: Path, tests: Sequence[str], read_only: Sequence[Path], python: str, seconds: float) -> list[bool]:
    """Which of the named tests pass: reported so, at least one for each name, and none else. A report needs a word that
    only pytest's plugin knows; and all are void if a test that is made to fail passes, too."""
    word, decoy, results = os.urandom(16).hex(), f"test_{os.urandom(6).hex()}", os.memfd_create("results")
    trap = tree / Path(tests[0].split("::")[0]).with_name(f"{decoy}.py")
    trap.write_text(f"def {decoy}():\n    assert {os.urandom(4).hex()!r} == ''\n")
    command = [*sandboxed(*read_only), python, "-IBc", RUN_TESTS, str(results), str(trap.relative_to(tree)), *tests]
    try:
        subprocess.run(command, cwd=tree, input=f"{word}\n".encode(), pass_fds=[results], timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"the tests timed out after {seconds:g} s")
        return [False] * len(tests)
    text = os.pread(results, 2**26, 0).decode(errors="replace")
    reports = re.findall(rf"^{word} (\w+) (\w+) (.*)$", text, re.M)  # (setup, call or teardown; outcome; test)

    def passed(test: str) -> bool:
        own = [(when, outcome) for when, outcome, name in reports if re.match(r"$|\[|::", name.removeprefix(test))]
        return ("call", "passed") in own and {outcome for _, outcome in own} == {"passed"}

    failed_as_made = any(outcome == "failed" and name.endswith(f"::{decoy}") for _, outcome, name in reports)
    return [failed_as_made and passed(test) for test in tests]


def verify_patch(task: dict, workdir: Path, turns: list[dict]) -> dict[str, float]:
    """1 if the named tests pass with the patch that the harness left. task["verifier"]: {"repo": where no agent writes,
    "tests": ["tests/test_a.py::test_b"], "base": "HEAD", "allowed": ["*"], "test_patch": "", "python": this one,
    "test_seconds": 300}; `test_patch` is ours: what the tests need beside the base."""
    verifier, tree = task["verifier"], workdir / "tree"
    try:
        read_only = clean_checkout(verifier, read_patch(workdir / "result" / "patch.diff"), tree)
    except Refused as refusal:
        print(f"refused: {refusal}")
        return {"reward": 0.0, "refused": 1.0, f"refused_{str(refusal).split(':')[0]}": 1.0}
    passed = run_tests(tree, verifier["tests"], read_only, verifier.get("python", sys.executable),
                       verifier.get("test_seconds", 300.0))
    return {"reward": float(all(passed)), "refused": 0.0, "tests_passed": sum(passed) / len(passed)}

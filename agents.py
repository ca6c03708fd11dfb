"""Harness adapters and verifiers: what runs inside a rollout. Imports nothing of ours and knows nothing of training.

A harness is `harness(task, workdir)`: it gets the task's `agent` part, finds its model in `OPENAI_BASE_URL`,
`OPENAI_API_KEY` and `MODEL_NAME`, leaves its result in `workdir/result/`, and fails by raising. A verifier is
`verify(task, workdir, turns)`: it runs in another process once the harness is dead, sees the task's `verifier` part
too, and returns the reward.

Search: the model asks a `search` tool (retrieval over HTTP) until it answers with a last line "Answer: ...". Reward is
exact match after Search-R1's normalization (arXiv 2503.09516), with F1 as a metric.
"""

import json
import os
import re
import string
import urllib.request
from collections import Counter
from pathlib import Path

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
    (workdir / "result").mkdir(exist_ok=True)
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

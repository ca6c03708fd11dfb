"""The built-in small model, its generated worlds, and the search harness that it learns in: real parts, few steps."""

import itertools
import json
import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import agents
import small_model
import small_tasks

PLACES = [
    {"country": "Belarus", "capital": "Minsk", "currency": "Belarusian ruble", "continent": "Europe"},
    {"country": "Guinea-Bissau", "capital": "Bissau", "currency": "Franc", "continent": "Africa"},
    {"country": "Trinidad and Tobago", "capital": "Port of Spain", "currency": "Dollar", "continent": "North America"},
    {"country": "Chad", "capital": "N'Djamena", "currency": "Franc", "continent": "Africa"},
    {"country": "São Tomé", "capital": "Água Izé", "currency": "Dobra", "continent": "Africa"},
]
NAMES = [value for place in PLACES for value in place.values()]
TOOLS = [agents.SEARCH_TOOL]


def demonstrate(rng: random.Random, bad: bool) -> list[dict]:
    return small_tasks.search_demonstration(rng, PLACES, bad, agents.SEARCH_SYSTEM, agents.show_results)


def quick(cache: Path, seed: int = 0, lines: list[str] | None = None) -> Path:
    """A model of two steps a phase: everything real but the learning."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HARNESSED_CACHE", str(cache))
        patch.setattr(small_model, "PHASES", {"repeats": 2, "good": 2, "bad": 2})
        return small_model.ensure(NAMES, demonstrate, TOOLS, seed, ([] if lines is None else lines).append)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quick(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path):
    return AutoTokenizer.from_pretrained(directory)


# ------------------------------------------------------------------------------------------------------ the directory


def test_is_an_ordinary_small_hugging_face_directory(directory: Path, tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.config.tie_word_embeddings
    assert sum(p.numel() for p in model.parameters()) < 5e6
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tools=TOOLS, add_generation_prompt=True,
                                        return_tensors="pt", return_dict=True)["input_ids"]
    assert model(ids).logits.shape == (1, ids.shape[1], len(tokenizer))


def test_made_once_the_same_from_a_seed_and_nothing_half_left(tmp_path: Path) -> None:
    lines: list[str] = []
    first, other, third = quick(tmp_path / "a", 1, lines), quick(tmp_path / "b", 1), quick(tmp_path / "a", 2)
    assert first.name == other.name != third.name
    assert (first / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    assert (first / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
    assert any("6/6 (bad)" in line for line in lines)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    again: list[str] = []
    assert quick(tmp_path / "a", 1, again) == first and not again
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted([first.name, third.name])


def test_two_at_once_and_one_that_dies_leave_one_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(aside: Path, *args: object) -> None:
        aside.mkdir(exist_ok=True)
        (aside / "config.json").write_text("{}")
        if turns.pop() == "dies":
            raise KeyboardInterrupt
        barrier.wait()

    monkeypatch.setattr(small_model, "make", make)
    monkeypatch.setenv("HARNESSED_CACHE", str(tmp_path))
    barrier, turns, made = threading.Barrier(2, timeout=30), ["dies"], []
    with pytest.raises(KeyboardInterrupt):
        small_model.ensure(NAMES, demonstrate, TOOLS, 3)
    assert list(tmp_path.iterdir()) == []
    turns = ["", ""]
    threads = [threading.Thread(target=lambda: made.append(small_model.ensure(NAMES, demonstrate, TOOLS, 3)))
               for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made[0] == made[1] and [p.name for p in tmp_path.iterdir()] == [made[0].name]


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HARNESSED_CACHE", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="HARNESSED_CACHE is .*file.*name another"):
        small_model.ensure(NAMES, demonstrate, TOOLS)


# -------------------------------------------------------------------------------------------- tokenizer and template


@given(st.text())
@settings(max_examples=300, deadline=None)
def test_tokenizer_is_lossless(tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_names_are_whole_pieces_and_markers_are_visible_text(tokenizer) -> None:
    pieces = lambda text: [p for p, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]  # noqa: E731
    assert pieces("of Guinea-Bissau, N'Djamena.") == ["of", "ĠGuinea-Bissau", ",", "ĠN'Djamena", "."]
    assert pieces("- Minsk: x\n- Minsk") == ["-", "ĠMinsk", ":", "Ġx", "Ċ-", "ĠMinsk"]
    ids = tokenizer.encode("<tool_call>\n{}\n</tool_call><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>\n{}\n</tool_call>"
    assert all(len(tokenizer.encode(marker)) == 1 for marker in small_model.SPECIAL + small_model.MARKERS)


TEXT = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)


def calling(arguments: object, content: str | None = None) -> dict:
    call = {"type": "function", "function": {"name": "search", "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


REPLY = st.one_of(
    st.builds(lambda text: {"role": "assistant", "content": text}, TEXT),
    st.builds(lambda text, query: calling(json.dumps({"query": query}, ensure_ascii=False), text), TEXT, TEXT))


@given(TEXT, st.lists(st.tuples(REPLY, TEXT), min_size=1, max_size=4), st.booleans())
@settings(max_examples=100, deadline=None)
def test_template_only_appends(tokenizer, question: str, rounds: list[tuple[dict, str]], with_system: bool) -> None:
    """A rollout stays one row: each prompt is the last prompt, the reply as sampled with its end of turn, and more."""
    messages = [{"role": "system", "content": "Be brief."}] * with_system + [{"role": "user", "content": question}]

    def render(prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=prompt)

    for reply, result in rounds:
        prompt = render(True)
        messages = messages + [reply]
        whole = render(False)
        assert whole.startswith(prompt) and whole.endswith("<|im_end|>\n")
        if not reply.get("tool_calls"):
            assert whole == f"{prompt}{reply['content']}<|im_end|>\n"
        elif not reply["content"]:
            arguments = reply["tool_calls"][0]["function"]["arguments"]
            call = f'{{"name": "search", "arguments": {arguments}}}'
            assert whole == f"{prompt}<tool_call>\n{call}\n</tool_call><|im_end|>\n"
        messages = messages + [{"role": "tool", "content": result}]
        assert render(True).startswith(whole)


def test_arguments_as_text_and_as_an_object_render_alike(tokenizer) -> None:
    def render(arguments: object) -> str:
        return tokenizer.apply_chat_template([calling(arguments)], tokenize=False)
    assert render({"query": "capital of São Tomé"}) == render('{"query": "capital of São Tomé"}')


def test_rows_are_what_the_template_renders_and_masks_are_the_replies(tokenizer) -> None:
    for seed in range(50):
        messages = demonstrate(random.Random(seed), seed % 2 == 1)
        ids, mask = small_model.encode(tokenizer, messages, TOOLS)
        assert ids == tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=True)["input_ids"]
        said = [tokenizer.decode([i for i, _ in group]) for trained, group in
                itertools.groupby(zip(ids, mask), key=lambda pair: pair[1]) if trained]
        assert len(said) == sum(m["role"] == "assistant" for m in messages)
        assert said[-1] == f"{messages[-1]['content']}<|im_end|>"
        assert all(re.fullmatch(r"<tool_call>\n\{.*\}\n</tool_call><\|im_end\|>", text) for text in said[:-1])


def test_initial_weights_look_back_and_lean_towards_copying(directory: Path) -> None:
    torch.manual_seed(0)
    config = AutoModelForCausalLM.from_pretrained(directory).config
    config._attn_implementation = "eager"
    wired = AutoModelForCausalLM.from_config(config)
    small_model.wire(wired)
    ids = torch.randint(0, config.vocab_size, (8, 20)).repeat(1, 2)
    attentions = wired(ids, output_attentions=True).attentions
    heads_in_group = config.num_attention_heads // config.num_key_value_heads
    for group in range(config.num_key_value_heads):
        assert attentions[0][:, group * heads_in_group].diagonal(-1 - group, -2, -1).min() > 0.9
    # At the second occurrence, the second layer's first head prefers what followed the first one to its neighbours.
    near = [attentions[1][:, 0].diagonal(-distance, -2, -1)[:, 1:].mean() for distance in (17, 18, 19, 20, 21)]
    assert near[2] == max(near) and near[2] > 1.2 * sum(near[:2] + near[3:]) / 4


# -------------------------------------------------------------------------------------------------- generated worlds


def test_fictional_worlds_hold_what_is_hard_in_real_names() -> None:
    rng = random.Random(0)
    world = small_tasks.fictional_world(rng, PLACES, 2000)
    names = [place["country"] for place in world]
    assert len(set(names)) > 1000 and all(all(place.values()) for place in world)
    for hard in ("-", "'", " of ", " and ", "ã"):
        assert any(hard in name for name in names), hard
    shared = sum(place["currency"][:4] == place["country"][:4] for place in world)
    assert shared > 100  # "Belarusian Ruble" in "Belarus"


def test_good_demonstrations_answer_from_what_they_found_bad_ones_often_do_not() -> None:
    kinds = set()
    for seed in range(300):
        messages = demonstrate(random.Random(seed), bad=False)
        answer = agents.final_answer(messages[-1]["content"])
        assert answer and answer in messages[-2]["content"]
        kinds.add((re.sub(r"(of|is|capital) (?!the\b)[^a-z].*", r"\1", messages[1]["content"]), len(messages)))
    assert {length for _, length in kinds} == {5, 7}  # one and two searches
    turns = [len(demonstrate(random.Random(seed), bad=True)) for seed in range(300)]
    assert {3, 5, 7} == set(turns) and turns.count(3) < turns.count(5)


def test_questions_have_their_answers_in_the_documents() -> None:
    for place in PLACES:
        text = " ".join(d["title"] + " " + d["text"] for d in small_tasks.documents(place))
        asked = small_tasks.questions(place)
        assert len({q["question"] for q in asked}) == len(asked) == 6 and {q["hops"] for q in asked} == {1, 2}
        assert all(q["answers"][0] in text for q in asked)


# ------------------------------------------------------------------------------------------------------- the harness


@pytest.mark.parametrize("answer, golds, em, f1", [
    ("The Paris.", ["paris"], 1, 1), ("Paris", ["Rome", "Paris"], 1, 1), ("Paris France", ["Paris"], 0, 2 / 3),
    ("", ["Paris"], 0, 0), ("Port  of Spain!", ["Port of Spain"], 1, 1), ("St. John's", ["St Johns"], 1, 1),
])
def test_exact_match_and_f1_as_in_search_r1(answer: str, golds: list[str], em: float, f1: float) -> None:
    assert agents.exact_match(answer, golds) == em and agents.f1(answer, golds) == pytest.approx(f1)


def test_verifier_reads_the_result_and_survives_its_absence(tmp_path: Path) -> None:
    task = {"id": "t", "agent": {}, "verifier": {"answers": ["Minsk"]}}
    assert agents.verify_search(task, tmp_path, [])["reward"] == 0.0
    (tmp_path / "result").mkdir()
    cases = [("Answer: Minsk", 1.0), ("Minsk", 0.0), ("Answer: Rome\nAnswer: minsk.", 1.0), ("Answer:", 0.0)]
    for text, reward in cases:
        (tmp_path / "result" / "answer.txt").write_text(text)
        assert agents.verify_search(task, tmp_path, [{}])["reward"] == reward
    (tmp_path / "result" / "answer.txt").write_bytes(b"Answer: \xff")
    assert agents.verify_search(task, tmp_path, [])["reward"] == 0.0


@pytest.fixture
def scripted() -> Iterator[tuple[str, list[dict], list[object]]]:
    """A model and a search server in one: replies come from a script, requests are kept."""
    requests: list[dict] = []
    script: list[object] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(body := json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if self.path == "/search":
                reply = {"results": [{"title": "Minsk", "text": f"found {body['query']}"}][: body["k"]]}
            else:
                step = script.pop(0)
                calls = [{"id": f"c{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
                         for i, (name, arguments) in enumerate(step)] if isinstance(step, list) else None
                message = {"role": "assistant", "content": None if calls else step, "tool_calls": calls}
                reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "m",
                         "choices": [{"index": 0, "finish_reason": "stop", "message": message}]}
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", requests, script
    server.shutdown()
    server.server_close()


def run_agent(url: str, workdir: Path, monkeypatch: pytest.MonkeyPatch, **task: object) -> str:
    for name, value in (("OPENAI_BASE_URL", f"{url}/v1"), ("OPENAI_API_KEY", "key"), ("MODEL_NAME", "m")):
        monkeypatch.setenv(name, value)
    (workdir / "result").mkdir(exist_ok=True)  # as the controller does
    agents.search_agent({"id": "t", "question": "Q?", "search_url": f"{url}/search", **task}, workdir)
    return (workdir / "result" / "answer.txt").read_text()


def test_search_agent_talks_as_the_demonstrations_do(scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, requests, script = scripted
    script += [[("search", '{"query": "capital of Chad"}')], "Answer: Minsk"]
    assert run_agent(url, tmp_path, monkeypatch) == "Answer: Minsk"
    chat = requests[-1]
    assert chat["tools"] == TOOLS and chat["messages"][0] == {"role": "system", "content": agents.SEARCH_SYSTEM}
    assert [m["role"] for m in chat["messages"]] == [m["role"] for m in demonstrate(random.Random(0), False)[:4]]
    assert chat["messages"][3]["content"] == "- Minsk: found capital of Chad"


def test_search_agent_answers_wrong_calls_and_stops_at_its_limit(
        scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, requests, script = scripted
    script += [[("search", "{broken"), ("search", "[1]"), ("shell", "{}")], [("search", '{"query": 7}')]]
    assert run_agent(url, tmp_path, monkeypatch, max_turns=2) == ""
    said = [m["content"] for m in requests[-2]["messages"] if m["role"] == "tool"]
    assert len(said) == 3 and all(text.startswith("Error:") for text in said) and "shell" in said[2]
    assert requests[-1] == {"query": "7", "k": 1}

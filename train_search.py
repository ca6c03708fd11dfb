"""Train a search agent: questions of one and two hops, answered with a search tool over a corpus.

    python train_search.py                              countries of the world, the built-in small model, on a CPU
    python train_search.py --model DIR                  a model of your own (any local Hugging Face directory)
    python train_search.py --train-file T --eval-file E --corpus C      your own questions and documents

Training and held-out questions are about different entities. The harness is `agents.search_agent` (the official openai
client in a loop), retrieval is BM25 (bm25s) behind HTTP in a process of its own, the reward is exact match
(`agents.verify_search`). Files are JSON Lines: {"question", "answers": [...]} and {"title", "text"}.
"""

import json
import random
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

import agents
import small_tasks
from config import Config, parse
from vllm_control import Children, free_port, healthy

HELD_OUT = 60  # countries


@dataclass(kw_only=True)
class SearchConfig(Config):
    # JSON Lines of training questions: {"question": str, "answers": [str, ...]}. Empty: countries of the world.
    train_file: str = ""
    # The same for evaluation.
    eval_file: str = ""
    # JSON Lines of the documents that the search tool finds: {"title": str, "text": str}.
    corpus: str = ""
    # Model calls of a rollout at most.
    max_turns: int = 4
    # Documents that one search shows.
    results_per_search: int = 1
    # Optimizer steps (one step trains GROUPS_PER_STEP groups) after which the run ends.
    steps: int = 30
    # Evaluate after every so many steps, and at the start and the end. 0: never.
    eval_every: int = 5
    # AdamW learning rate. 0: 5e-4 for the built-in small model, 1e-6 for others.
    lr: float = 0.0

    POSITIVE = Config.POSITIVE + " max_turns results_per_search"

    def validate(self) -> None:
        files = [self.train_file, self.eval_file, self.corpus]
        if any(files) and not all(files):
            raise ValueError("--train-file, --eval-file and --corpus go together: give all three or none")
        self.lr = self.lr or (1e-6 if self.model else 5e-4)
        super().validate()


Text = Annotated[str, Field(min_length=1)]


class Question(BaseModel):
    question: Text
    answers: list[Text] = Field(min_length=1)


class Document(BaseModel):
    title: Text
    text: Text


def read_jsonl(path: str, kind: type[BaseModel]) -> list[dict]:
    """Records of a JSON Lines file; ValueError with file and line for one that is not of this kind."""
    records = []
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            records += [kind.model_validate_json(line).model_dump()] if line.strip() else []
        except ValidationError as error:
            place, problem = error.errors()[0]["loc"], error.errors()[0]["msg"]
            raise ValueError(f"{path}, line {number}: {'.'.join(map(str, place))} {problem}") from None
    if not records:
        raise ValueError(f"{path}: there is nothing in it; each line is one of {list(kind.model_fields)}")
    return records


def load_data(config: SearchConfig) -> tuple[list[dict], list[dict], list[dict], list[small_tasks.Place]]:
    """Training questions, evaluation questions, documents, and training places (for the small model's warm start)."""
    places = small_tasks.countries()
    random.Random(0).shuffle(places)  # one split for all seeds
    held_out, training = places[:HELD_OUT], places[HELD_OUT:]
    if config.train_file:
        return (read_jsonl(config.train_file, Question), read_jsonl(config.eval_file, Question),
                read_jsonl(config.corpus, Document), training)
    train, evaluation = ([q for place in part for q in small_tasks.questions(place)] for part in (training, held_out))
    return train, evaluation, [d for place in places for d in small_tasks.documents(place)], training


def task(config: SearchConfig, name: str, question: dict, search_url: str) -> dict:
    return {"id": name, "agent": {"harness": "agents:search_agent", "question": question["question"],
                                  "search_url": search_url, "max_turns": config.max_turns,
                                  "results_per_search": config.results_per_search},
            "verifier": {"verify": "agents:verify_search", "answers": question["answers"]}}


def built_in_model(places: list[small_tasks.Place], seed: int) -> str:
    """The small model's directory. It has seen how to search, in made-up worlds."""
    import small_model

    names = [value for place in places for value in place.values()]
    demonstrate = partial(small_tasks.search_demonstration, places=places, system=agents.SEARCH_SYSTEM,
                          show=agents.show_results)
    return str(small_model.ensure(names, lambda rng, bad: demonstrate(rng, bad=bad), [agents.SEARCH_TOOL], seed))


def main() -> None:
    config = parse(SearchConfig)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        train, evaluation, documents, places = load_data(config)
        import torch

        from trainer import fit

        if not config.model and torch.cuda.is_available() and config.device != "cpu":
            config.model = "Qwen/Qwen3.5-9B"
        config.model = config.model or built_in_model(places, config.seed)
        with Children(config.run_dir) as children:
            port, corpus = free_port(kept=config.run_dir / "search.port"), config.run_dir / "corpus.json"
            corpus.write_text(json.dumps(documents))
            children.start("search", [small_tasks.__file__, str(corpus.absolute()), str(port)])
            children.wait_until(lambda: healthy(f"http://127.0.0.1:{port}"), "the search server", 60)
            url = f"http://127.0.0.1:{port}/search"
            tasks = ([task(config, f"{name}.{i}", question, url) for i, question in enumerate(part)]
                     for name, part in (("train", train), ("eval", evaluation)))
            fit(config, *tasks, children)
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; go on with --resume --name " + config.name)


if __name__ == "__main__":
    main()

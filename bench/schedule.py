"""Schedules compared in simulated time: python bench/schedule.py [--gpus 4 8] [--trace runs/NAME/gateway.sqlite]

The run's own `Scheduler` decides; only what takes time is simulated:

    rollout   tool -> call -> tool -> call ... -> verifier, drawn by a law that is printed, or those of a recorded run
    engine    GPUs read what is new of a call's prompt, one call each, then sample; the more calls, the slower each. A switch
              empties the cache: each rollout's next call (or the rest of an aborted one) reads its whole context again.
    trainer   its turn is sleep, load, update(s), push, wake. Tools run on meanwhile; calls wait.

    synchronous   as many groups in flight as in a step
    drain         an update as soon as a step's groups are complete, once the calls in flight have ended
    ours          calls are aborted and go on from the tokens they have; the scheduler says when, and how many updates

Everything is counted after a quarter of the updates, when the first short rollouts are through. `busy`: time in updates, or
with a call for each GPU. `length`: mean turns of the trained rollouts against those of all that started in that time.
Left out: rollouts that fail or hang, groups without a signal (unless recorded), evaluation, a full KV cache.
"""

import argparse
import heapq
import math
import random
import sqlite3
import statistics
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gateway import loaded  # noqa: E402
from scheduler import Group, Scheduler  # noqa: E402


class Turn(NamedTuple):
    tool: float  # seconds before the call
    prompt: int  # tokens
    new: int  # of these, not in the engine's cache
    response: int


@dataclass
class Rollout:
    turns: list[Turn]
    verifier: float  # seconds from the last call to the end
    reward: float | None

    @property
    def tokens(self) -> int:
        return self.turns[-1].prompt + self.turns[-1].response if self.turns else 0


Source = Callable[[int, int], Rollout]  # (group, index) -> its rollout, always the same


@dataclass
class Machine:
    """Defaults: a model of 9B parameters on H100s."""

    gpus: int = 8
    token_seconds: float = 0.010  # of a call that has its GPU to itself
    half_speed: float = 32.0  # calls on one GPU at which each goes half as fast
    read_speed: float = 20_000.0  # prompt tokens/s of one GPU
    train_speed: float = 6_000.0  # tokens/s of one GPU in an update
    before: float = 8.0  # seconds for sleep and load
    after: float = 17.0  # for push and wake
    max_running: float = math.inf  # rollouts at once


@dataclass
class Law:
    """Log-normal numbers (median, sigma of the logarithm): most are small and a few are huge."""

    seed: int = 0
    turns: tuple[float, float, float] = (14, 0.5, 0.7)  # sigma of the task's difficulty, and of the rollout's luck
    most_turns: int = 100
    tool: tuple[float, float] = (4.0, 1.5)  # seconds, 600 at most
    setup: float = 10.0  # seconds before the first call; as many for the verifier
    first_prompt: int = 3000
    tool_output: tuple[float, float] = (400, 1.0)  # tokens, 4,000 at most
    response: tuple[float, float] = (150, 0.9)

    def __call__(self, k: int, index: int) -> Rollout:
        median, hard, luck = self.turns
        draw = random.Random(f"{self.seed}/{k}/{index}")
        spread = hard * random.Random(f"{self.seed}/{k}").gauss(0, 1) + luck * draw.gauss(0, 1)

        def number(law: tuple[float, float], most: float) -> float:
            return min(most, law[0] * math.exp(law[1] * draw.gauss(0, 1)))

        turns, prompt = [], 0
        for i in range(max(1, min(self.most_turns, round(median * math.exp(spread))))):
            new = 1 + round(number(self.tool_output, 4000)) if i else self.first_prompt
            prompt, response = prompt + new, 1 + round(number(self.response, 4000))
            turns.append(Turn(number(self.tool, 600) if i else self.setup, prompt, new, response))
            prompt += response
        return Rollout(turns, self.setup, float(index % 2))


SHORT = {"turns": (4, 0.5, 0.7), "tool": (0.5, 1.2), "setup": 1.0, "response": (100, 0.9)}  # a search agent, say


# ---- a recorded run


def recorded(path: Path, seed: int = 0) -> tuple[Source, Machine, dict[str, int]]:
    """The rollouts of a gateway's log, its groups drawn again and again; the engine and the costs as measured there; and
    groups_per_step and rollouts_per_group. A call's time is fitted by its tokens and the calls beside it, so that what it
    was held does not count (the 5% longest are left out)."""
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    groups: dict[str, list[Rollout]] = {}
    calls: list[tuple[float, float, int, int]] = []  # start, end, new, response
    sql = ('SELECT id, "group", attempts, reward, started_at, finished_at FROM rollouts '
           "WHERE kind = 'train' AND finished_at IS NOT NULL AND turns > 0 ORDER BY rowid")
    for name, group, attempt, reward, now, finished in db.execute(sql).fetchall():
        turns = []
        sql = ('SELECT started_at, finished_at, prompt, shared, length(ids) / 4 + shared - prompt FROM turns '
               "WHERE rollout = ? AND attempt = ? ORDER BY started_at")
        for start, end, prompt, shared, response in db.execute(sql, (name, attempt)):
            new = max(1, prompt - shared)
            turns.append(Turn(max(0.0, start - now), prompt, new, response))
            calls.append((start, end, new, response))
            now = end
        groups.setdefault(group, []).append(Rollout(turns, max(0.0, finished - now), reward))
    if not groups:
        raise ValueError(f"{path} has no finished training rollout with a model call")
    steps = [loaded(row[0]) for row in db.execute("SELECT data FROM steps ORDER BY step")]
    machine = fitted(calls)
    if steps:
        machine.before, machine.after = 0.0, steps[-1]["seconds_switch"]
        per_group = statistics.median(step["seconds_update"] / step["groups"] for step in steps)
        machine.train_speed = statistics.mean(sum(r.tokens for r in g) for g in groups.values()) / per_group
    pool, size = [*groups.values()], max(map(len, groups.values()))

    def source(k: int, index: int) -> Rollout:
        group = pool[k] if k < len(pool) else random.Random(f"{seed}/{k}").choice(pool)
        return group[index % len(group)]
    return source, machine, {"groups_per_step": max((step["groups"] for step in steps), default=1), "rollouts_per_group": size}


def fitted(calls: list[tuple[float, float, int, int]]) -> Machine:
    """seconds = work * a + work * (calls beside it) * b, least squares. A log does not tell reading from sampling: of the
    work, a token that is read is taken for a hundredth of one that is sampled."""
    import numpy

    edges = sorted([(start, 1) for start, *_ in calls] + [(end, -1) for _, end, *_ in calls])
    beside, at = {}, 0
    for time, change in edges:
        at += change
        beside[time] = at
    longest = sorted(end - start for start, end, *_ in calls)[int(0.95 * (len(calls) - 1))]
    rows = [(response + new / 100, beside[start] - 1, end - start) for start, end, new, response in calls
            if end - start <= longest]
    work, many, seconds = numpy.array(rows, dtype=float).T
    alone, crowd = numpy.linalg.lstsq(numpy.stack([work, work * many], 1), seconds, rcond=None)[0]
    if not alone > 0 < crowd:
        alone, crowd = float((seconds @ work) / (work @ work)), 1e-9
    return Machine(gpus=1, token_seconds=float(alone), half_speed=float(alone / crowd), read_speed=100 / float(alone))


# ---- the simulation


class Live:
    """A rollout that runs."""

    def __init__(self, group: Group, index: int, rollout: Rollout) -> None:
        self.group, self.index, self.rollout, self.turn = group, index, rollout, -1
        self.left = 0.0  # tokens of the present response still to be sampled
        self.cache = -1  # of which of the engine's turns its context is cached
        self.oldest: int | None = None  # version of its first token


class Engine:
    """Two stages, reading and sampling, each shared evenly by its calls: a call ends when the work done for every call of
    its stage so far reaches what it was when the call came plus the call's own."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.now, self.turn, self.version = machine, 0.0, 0, 0
        self.done = [0.0, 0.0]  # work for each call so far: seconds of a GPU, tokens
        self.speeds = (0.0, 0.0)  # its growth
        self.stages: tuple[list, list] = ([], [])  # heaps of (work at its end, tie, Live)
        self.busy = self.entries = 0.0

    @property
    def calls(self) -> int:
        return len(self.stages[0]) + len(self.stages[1])

    def next_end(self) -> float:
        """When the first of its present calls ends a stage."""
        m, (reading, sampling), end = self.machine, self.stages, math.inf
        free = 1 - 0.9 * min(1.0, len(reading) / m.gpus)  # reading comes first, but never alone
        self.speeds = (min(1.0, m.gpus / max(len(reading), 1)),
                       free / (m.token_seconds * (1 + len(sampling) / (m.gpus * m.half_speed))))
        for heap, done, speed in zip(self.stages, self.done, self.speeds):
            if heap:
                end = min(end, self.now + max(0.0, heap[0][0] - done) / speed)
        return end

    def advance(self, now: float) -> list[Live]:
        """Calls that have ended by then. After `next_end`, and not beyond that."""
        seconds, (reading, sampling), (read, sample) = now - self.now, self.stages, self.speeds
        self.busy += seconds * min(1.0, (len(reading) + len(sampling)) / self.machine.gpus)
        self.done[0] += seconds * read
        self.done[1] += seconds * sample
        self.now, ended = now, []
        while reading and reading[0][0] <= self.done[0] + 1e-9:
            self.enter(1, heapq.heappop(reading)[2])
        while sampling and sampling[0][0] <= self.done[1] + 1e-6:
            ended.append(heapq.heappop(sampling)[2])
        return ended

    def enter(self, stage: int, live: Live) -> None:
        turn = live.rollout.turns[live.turn]
        work = live.left if stage else turn.new if live.cache == self.turn else turn.prompt + turn.response - live.left
        if stage and live.oldest is None:
            live.oldest = self.version
        live.cache, self.entries = self.turn, self.entries + 1
        heapq.heappush(self.stages[stage], (self.done[stage] + (work if stage else work / self.machine.read_speed),
                                            self.entries, live))

    def abort(self) -> list[Live]:
        """All calls, which keep the tokens they have."""
        calls = [live for heap in self.stages for _, _, live in sorted(heap, key=lambda entry: entry[1])]
        for end, _, live in self.stages[1]:
            live.left = max(1e-3, end - self.done[1])
        self.stages = ([], [])
        return calls


class Simulation:
    def __init__(self, source: Source, machine: Machine, scheduler: Scheduler, drain: bool = False) -> None:
        self.source, self.machine, self.scheduler, self.drain = source, machine, scheduler, drain
        self.engine, self.now, self.open = Engine(machine), 0.0, True  # open: calls go through
        self.tools: list[tuple[float, int, Live]] = []  # heap of (time at its end, tie, who waits for it)
        self.queued: deque[Live] = deque()  # rollouts without a place to run
        self.held: list[Live] = []  # calls that wait at the gate
        self.unread: list[dict[str, Any]] = []  # records of rollouts that are over
        self.running = self.entries = self.turns = 0
        self.updating = 0.0  # seconds in updates
        self.started: list[Group] = []
        self.trained: list[Group] = []
        self.staleness: list[int] = []
        self.in_flight: list[int] = []
        self.mark = self.snapshot()

    def run(self, updates: int) -> dict[str, Any]:
        scheduler, checked, news = self.scheduler, 0.0, True
        while scheduler.version < updates:
            if news or self.now > checked + 1:  # the scheduler is asked at least once a second
                checked, more = self.now, not self.drain and scheduler.version + 1 < updates
                for group in scheduler.to_start():
                    scheduler.group_started(group, self.now)
                    self.started.append(group)
                    self.queued.extend(Live(group, i, self.source(group.k, i)) for i in range(scheduler.rollouts_per_group))
                self.start_queued()
                if scheduler.ready_to_update(self.now, more)[0]:
                    self.trainers_turn(updates)
                    continue
            news = self.advance()
        return self.result()

    def start_queued(self) -> None:
        while self.queued and self.running < self.machine.max_running:
            self.running += 1
            self.next_tool(self.queued.popleft())

    def next_tool(self, live: Live) -> None:
        turns, live.turn, self.entries = live.rollout.turns, live.turn + 1, self.entries + 1
        seconds = turns[live.turn].tool if live.turn < len(turns) else live.rollout.verifier
        heapq.heappush(self.tools, (self.now + seconds, self.entries, live))

    def tools_ended(self) -> None:
        """Those that end now: a call follows, or the rollout is over."""
        while self.tools and self.tools[0][0] <= self.now:
            live = heapq.heappop(self.tools)[2]
            if live.turn < len(live.rollout.turns):
                live.left = live.rollout.turns[live.turn].response
                self.engine.enter(0, live) if self.open else self.held.append(live)
                continue
            self.running -= 1
            self.start_queued()
            self.unread.append({
                "id": f"{live.group.id}.{live.index}", "group": live.group.id, "kind": "train", "status": "succeeded",
                "reward": live.rollout.reward, "version_min": live.oldest, "version_max": self.engine.version})

    def read(self) -> bool:
        """Whether a rollout was over."""
        for record in self.unread:
            self.scheduler.rollout_finished(record, self.now)
        news, self.unread = bool(self.unread), []
        return news

    def advance(self) -> bool:
        """To the next end of a tool or a call. Whether a rollout was over."""
        now = min(self.tools[0][0] if self.tools else math.inf, self.engine.next_end())
        assert now < math.inf, "nothing can happen any more"
        self.now = now
        for live in self.engine.advance(now):
            self.next_tool(live)
        self.tools_ended()
        return self.read()

    def wait(self, seconds: float) -> None:
        """The engine sleeps, tools run on."""
        until = self.now + seconds
        while self.tools and self.tools[0][0] <= until:
            self.now = self.tools[0][0]
            self.tools_ended()
        self.now = until
        self.engine.advance(until)

    def trainers_turn(self, updates: int) -> None:
        scheduler, machine, self.open = self.scheduler, self.machine, False
        while self.drain and self.engine.calls:
            self.advance()
        (groups, _), at = scheduler.ready_to_update(self.now, more=False), self.now
        self.held += self.engine.abort()
        self.wait(machine.before)
        while groups:
            self.trained += groups
            self.staleness += [scheduler.version - record["version_min"] for group in groups for record in group.kept]
            tokens = sum(self.source(group.k, i).tokens for group in groups for i in range(scheduler.rollouts_per_group))
            scheduler.update_started(groups, at)
            self.updating += (seconds := tokens / (machine.train_speed * machine.gpus))
            self.wait(seconds)
            at = self.now
            scheduler.update_finished(at, scheduler.version + 1)
            self.in_flight.append(scheduler.groups_in_flight)
            more = not self.drain and scheduler.version < updates
            groups = scheduler.ready_to_update(at)[0] if more else []
        self.wait(machine.after)
        scheduler.engine_resumed(self.now, machine.before + machine.after)
        self.turns, self.open, self.engine.version = self.turns + 1, True, scheduler.version
        self.engine.turn += 1
        self.read()
        for live in self.held:
            self.engine.enter(0, live)
        self.held = []
        if not self.mark["updates"] and 4 * scheduler.version >= updates:
            self.mark = self.snapshot()

    def snapshot(self) -> dict[str, float]:
        return {"now": self.now, "started": len(self.started), "trained": len(self.trained), "turns": self.turns,
                "updates": self.scheduler.version, "busy": self.engine.busy + self.updating, "updating": self.updating}

    def result(self) -> dict[str, Any]:
        since = {name: value - self.mark[name] for name, value in self.snapshot().items()}
        started, trained = self.started[int(self.mark["started"]):], self.trained[int(self.mark["trained"]):]
        size, counts = self.scheduler.rollouts_per_group, self.scheduler.counts
        length, of_all = (statistics.mean(len(self.source(group.k, i).turns) for group in groups for i in range(size))
                          for groups in (trained, started))
        return {"groups_per_hour": 3600 * since["trained"] / since["now"], "busy": since["busy"] / since["now"],
                "step_seconds": since["now"] / since["updates"], "update_seconds": since["updating"] / since["updates"],
                "updates_per_turn": since["updates"] / since["turns"], "staleness_mean": statistics.mean(self.staleness),
                "staleness_max": max(self.staleness), "bound": self.scheduler.max_staleness,
                "length": length / of_all - 1, "dropped": counts["groups_stale"] / len(self.trained),
                "in_flight": statistics.mean(self.in_flight), "consumed": list(self.scheduler.consumed)}


def simulate(source: Source, machine: Machine, in_flight: Any = 0, drain: bool = False, updates: int = 60,
             groups_per_step: int = 16, rollouts_per_group: int = 8) -> dict[str, Any]:
    scheduler = Scheduler(groups_per_step=groups_per_step, rollouts_per_group=rollouts_per_group,
                          groups_in_flight=in_flight, max_refills=groups_per_step, max_skipped_steps=updates)
    return Simulation(source, machine, scheduler, drain).run(updates)


def compare(title: str, source: Source, machine: Machine, updates: int, groups_per_step: int, rollouts_per_group: int) -> None:
    print(f"\n{title}: {groups_per_step} groups of {rollouts_per_group} a step, {updates} updates\n{machine}")
    print(f"{'':18}{'in flight':>9}{'groups/h':>9}{'speed-up':>9}{'busy':>6}{'step s':>8}{'update s':>9}{'updates/turn':>13}"
          f"{'staleness mean, max, bound':>27}{'length':>8}{'dropped':>8}")
    rows: list[tuple[str, Any, bool]] = [("synchronous", 0, False)]
    rows += [(name, times * groups_per_step, name == "drain") for times in (2, 3, 4) for name in ("drain", "ours")]
    base = 0.0
    for name, in_flight, drain in [*rows, ("ours, auto", "auto", False)]:
        r = simulate(source, machine, in_flight, drain, updates, groups_per_step, rollouts_per_group)
        base = base or r["groups_per_hour"]
        print(f"{name:18}{r['in_flight']:9.0f}{r['groups_per_hour']:9.0f}{r['groups_per_hour'] / base:8.2f}x{r['busy']:6.2f}"
              f"{r['step_seconds']:8.0f}{r['update_seconds']:9.1f}{r['updates_per_turn']:13.2f}{r['staleness_mean']:15.2f}"
              f"{r['staleness_max']:6}{r['bound']:6}{r['length']:+8.1%}{r['dropped']:8.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="gateway.sqlite of a run, instead of the laws")
    parser.add_argument("--max-running", type=int, default=64, help="with --trace: as that run had it")
    parser.add_argument("--gpus", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=80)
    options = parser.parse_args()
    if options.trace:
        source, machine, shape = recorded(options.trace, options.seed)
        machine.max_running = options.max_running
        return compare(str(options.trace), source, machine, options.updates, **shape)
    law = Law(options.seed)
    print(f"The law of the rollouts. {Law.__doc__}\n{law}")
    for gpus in options.gpus:
        compare(f"Long rollouts, {gpus} GPUs", law, Machine(gpus), options.updates, 16, 8)
    law = Law(options.seed, **SHORT)
    print(f"\nA law of short rollouts, where a switch takes longer than an update:\n{law}")
    compare("Short rollouts", law, Machine(), 4 * options.updates, 4, 8)


if __name__ == "__main__":
    main()

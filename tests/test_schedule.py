"""bench/schedule.py: its clockwork by hand, the replay of a log, and what the schedules must reach at full scale."""

import functools
import random
import sqlite3
import zlib
from pathlib import Path
from typing import Any

import orjson
import pytest

from bench.schedule import SHORT, Engine, Law, Live, Machine, Rollout, Turn, fitted, recorded, simulate
from gateway import SCHEMA
from scheduler import Group

ALONE = Machine(gpus=1, token_seconds=0.1, half_speed=1.0, read_speed=100.0, train_speed=100.0, before=3.0, after=4.0)


def live(prompt: int, new: int, response: int, cached: bool = True) -> Live:
    one = Live(Group("g", 0), 0, Rollout([Turn(0.0, prompt, new, response)], 0.0, 1.0))
    one.turn, one.left, one.cache = 0, float(response), 0 if cached else -1
    return one


def run_until(engine: Engine, until: float = 1e9) -> list[tuple[float, Live]]:
    """Ends of calls, until none is left, or to a time."""
    ended = []
    while engine.calls and engine.now < until:
        now = min(engine.next_end(), until)
        ended += [(round(engine.now, 6), one) for one in engine.advance(now)]
    return ended


def test_a_call_alone_reads_what_is_new_and_samples() -> None:
    engine = Engine(ALONE)
    engine.enter(0, one := live(1000, 200, 10))
    assert run_until(engine) == [(2 + 10 * 0.1 * 2, one)]  # alone, but one call of `half_speed` 1: at half its speed
    engine.enter(0, one := live(1000, 200, 10, cached=False))
    assert run_until(engine) == [(4 + 10 + 2, one)]
    assert engine.busy == 16


def test_calls_slow_each_other_down() -> None:
    engine = Engine(ALONE)
    first, second = live(0, 0, 30), live(0, 0, 10)
    engine.enter(0, first)
    engine.enter(0, second)
    # Both sample at 1 / 3 of the speed until the second ends, then the first at 1 / 2: 10 * 0.3, and 20 * 0.2 more.
    assert run_until(engine) == [(3.0, second), (7.0, first)]


def test_an_aborted_call_keeps_its_tokens_and_reads_its_context_again() -> None:
    engine = Engine(ALONE)
    engine.enter(0, one := live(100, 0, 10))
    assert run_until(engine, until=1.0) == [] and one.oldest == 0
    assert engine.abort() == [one] and one.left == pytest.approx(5) and engine.calls == 0
    engine.turn, engine.version = 1, 1
    engine.enter(0, one)
    assert run_until(engine) == [(pytest.approx(1 + 1.05 + 5 * 0.2), one)] and one.oldest == 0


@pytest.mark.parametrize("drain", [False, True])
def test_a_synchronous_run_takes_what_its_parts_take(drain: bool) -> None:
    rollout = Rollout([Turn(5.0, 100, 100, 10), Turn(7.0, 200, 90, 10)], 6.0, None)

    def source(k: int, index: int) -> Rollout:
        return Rollout(rollout.turns, rollout.verifier, float(index))

    result = simulate(source, ALONE, drain=drain, updates=8, groups_per_step=1, rollouts_per_group=2)
    # Two rollouts in step: reading shares the GPU, sampling goes at 1 / 3 of the speed. An update reads 2 * 210 tokens.
    seconds = 5 + 2 * 1.0 + 10 * 0.3 + 7 + 2 * 0.9 + 10 * 0.3 + 6 + 420 / 100 + 3 + 4
    assert result["step_seconds"] == pytest.approx(seconds, rel=1e-6) and result["update_seconds"] == pytest.approx(4.2)
    assert result["groups_per_hour"] == pytest.approx(3600 / seconds)
    assert result["busy"] == pytest.approx((2 * 1.0 + 3 + 2 * 0.9 + 3 + 4.2) / seconds)
    assert result["staleness_max"] == 0 and result["updates_per_turn"] == 1 and result["consumed"] == [*range(8)]


@pytest.mark.parametrize("tool,left", [(20.0, 3.0), (5.0, 0.0)])
def test_tools_run_on_in_the_trainers_turn_and_calls_wait(tool: float, left: float) -> None:
    def source(k: int, index: int) -> Rollout:
        return Rollout([Turn(1.0, 0, 0, 1), Turn(tool, 0, 0, 1)][: k + 1], 0.0, float(index))

    machine = Machine(1, token_seconds=1e-9, train_speed=0.2, before=3, after=4)
    run = simulate(source, machine, 2, updates=2, groups_per_step=1, rollouts_per_group=2)
    # The first group takes 1 s, and a turn of the trainer 3 + 2 / 0.2 + 4 = 17 s, in which the tool of the other runs.
    assert run["step_seconds"] == pytest.approx(left + 17) and run["updates_per_turn"] == 1 and run["staleness_max"] == 1


def test_a_run_is_the_same_again() -> None:
    runs = [simulate(Law(3, **SHORT), Machine(), "auto", updates=12, groups_per_step=4) for _ in range(2)]
    assert runs[0] == runs[1] != simulate(Law(4, **SHORT), Machine(), "auto", updates=12, groups_per_step=4)


# A recorded run


def test_the_log_of_a_gateway_is_replayed(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "gateway.sqlite")
    db.executescript(SCHEMA)
    for k, reward in enumerate((1.0, None)):
        for index in range(2):
            name = f"train.{k}.{index}"
            db.execute('INSERT INTO rollouts(id, "group", "index", kind, status, attempts, reward, turns, started_at, '
                       "finished_at) VALUES(?, ?, ?, 'train', 'succeeded', 2, ?, 2, 100, 130)",
                       (name, f"train.{k}", index, reward and reward * index))
            for attempt, at, start, end, prompt, shared, ids in (
                    (1, 0, 0, 50, 9, 0, 99), (2, 1, 115, 120, 40, 30, 15), (2, 0, 101, 105, 20, 0, 30)):
                db.execute('INSERT INTO turns(rollout, attempt, "index", prompt, shared, ids, started_at, finished_at) '
                           "VALUES(?, ?, ?, ?, ?, ?, ?, ?)", (name, attempt, at, prompt, shared, bytes(4 * ids), start, end))
    db.execute("INSERT INTO rollouts(id, kind, turns, started_at, finished_at) VALUES('eval.0.0', 'eval', 1, 1, 2)")
    db.execute("INSERT INTO rollouts(id, kind, turns, started_at) VALUES('train.2.0', 'train', 1, 1)")  # runs still
    step = {"step": 1, "groups": 2, "seconds_update": 9.0, "seconds_switch": 3.0}
    db.execute("INSERT INTO steps VALUES(1, ?)", (zlib.compress(orjson.dumps(step)),))
    db.commit()
    source, machine, shape = recorded(tmp_path / "gateway.sqlite")
    assert shape == {"groups_per_step": 2, "rollouts_per_group": 2}
    assert source(0, 1) == Rollout([Turn(1.0, 20, 20, 10), Turn(10.0, 40, 10, 5)], 10.0, 1.0) and source(1, 0).reward is None
    assert source(7, 1) == source(7, 1) and source(7, 1) in (source(0, 1), source(1, 1))
    assert (machine.before, machine.after) == (0, 3.0) and 2 * 2 * 45 / machine.train_speed == 9.0


def test_the_engine_of_a_log_is_fitted() -> None:
    draw, calls = random.Random(0), []
    for start in range(0, 4000, 40):  # batches of calls that begin together; some of them are held for long
        for i in range(draw.randint(1, 20)):
            new, response = draw.randint(1, 4000), draw.randint(1, 300)
            seconds = (response + new / 100) * 0.01 * (1 + i / 32)
            calls.append((start + 0.001 * i, start + 0.001 * i + (35 if draw.random() < 0.02 else seconds), new, response))
    machine = fitted(calls)
    assert machine.token_seconds == pytest.approx(0.01, rel=0.1) and machine.half_speed == pytest.approx(32, rel=0.2)
    assert machine.read_speed == pytest.approx(10_000, rel=0.1)
    alone = fitted([(0, 1.0, 100, 9), (10, 12.0, 100, 19), (20, 21.0, 100, 9)])
    assert alone.token_seconds == pytest.approx(0.1) and alone.half_speed > 1e6


# The scale of the report: 16 groups of 8, up to 100 turns, 4 and 8 GPUs

Runs = dict[tuple[int, Any, bool], dict[str, Any]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Results by (GPUs, groups in flight, drain)."""
    source = functools.cache(Law(0))
    settings = [(0, False), ("auto", False), *((times * 16, drain) for times in (2, 3, 4) for drain in (False, True))]
    return {(gpus, *setting): simulate(source, Machine(gpus), *setting, updates=32 if setting[0] == "auto" else 20)
            for gpus in (4, 8) for setting in settings if gpus == 8 or setting[0] != 48}


@pytest.mark.parametrize("gpus", [4, 8])
def test_twice_the_groups_in_flight_are_twice_as_fast_as_synchronous_and_auto_three_times(runs: Runs, gpus: int) -> None:
    synchronous = runs[gpus, 0, False]
    assert synchronous["update_seconds"] < 0.1 * synchronous["step_seconds"]  # the case that the claims are about
    base = synchronous["groups_per_hour"]
    assert runs[gpus, 32, False]["groups_per_hour"] >= 2.0 * base
    assert runs[gpus, "auto", False]["groups_per_hour"] >= 3.0 * base


def test_never_slower_than_the_one_that_drains(runs: Runs) -> None:
    ratios = {key: run["groups_per_hour"] / runs[(*key[:2], True)]["groups_per_hour"]
              for key, run in runs.items() if (*key[:2], True) in runs and not key[2]}
    assert len(ratios) == 5 and min(ratios.values()) >= 1.0, ratios


def test_nothing_is_trained_too_old_nor_dropped(runs: Runs) -> None:
    for key, run in runs.items():
        times = 4 if key[1] == "auto" else (key[1] or 16) / 16
        assert run["bound"] == 2 * times and run["staleness_max"] <= run["bound"] and run["dropped"] < 0.01, (key, run)


@pytest.mark.parametrize("in_flight", [32, 64, "auto"])
def test_long_rollouts_are_trained_as_often_as_short_ones(in_flight: Any) -> None:
    run = simulate(functools.cache(Law(1)), Machine(8), in_flight, updates=64)
    assert abs(run["length"]) < 0.03 and run["dropped"] == 0, run


@pytest.mark.parametrize("in_flight", [8, 16, "auto"])
def test_short_updates_are_not_drowned_in_switches(in_flight: Any) -> None:
    source = functools.cache(Law(0, **SHORT))
    ours, drain = (simulate(source, Machine(), in_flight, drain, updates=100, groups_per_step=4) for drain in (False, True))
    assert ours["update_seconds"] < 6 < Machine().before + Machine().after
    gain = ours["groups_per_hour"] / drain["groups_per_hour"]
    assert gain >= (1.0 if in_flight == 8 else 1.5), gain
    assert ours["updates_per_turn"] > 1.5 * drain["updates_per_turn"] or in_flight == 8
    assert ours["staleness_mean"] <= drain["staleness_mean"] and abs(ours["length"]) < 0.03

"""The scheduler: each rule by hand, the field cases, and random runs with failures, time-outs and restarts."""

import heapq
import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scheduler import Group, Record, Scheduler, task_order


def make(**settings_: Any) -> Scheduler:
    return Scheduler(**{"groups_per_step": 2, "rollouts_per_group": 2, **settings_})


def start(scheduler: Scheduler, now: float = 0.0) -> list[Group]:
    groups = scheduler.to_start()
    for group in groups:
        scheduler.group_started(group, now)
    return groups


def record(group: str, index: int, reward: float | None, status: str = "succeeded", **more: Any) -> Record:
    return {"id": f"{group}.{index}", "group": group, "status": status, "reward": reward, "kind": "train", **more}


def finish(scheduler: Scheduler, group: Group, *rewards: float | None, now: float = 1.0, **more: Any) -> list[str]:
    return [scheduler.rollout_finished(record(group.id, i, reward, **more), now) for i, reward in enumerate(rewards)]


def update(scheduler: Scheduler, now: float = 2.0, seconds: float = 0.0) -> list[Group]:
    groups, why = scheduler.ready_to_update(now)
    assert groups, why
    scheduler.update_started(groups, now)
    scheduler.update_finished(now + seconds, scheduler.version + 1)
    return groups


def names(groups: list[Group]) -> list[int]:
    return [group.k for group in groups]


# Starting and updating


def test_synchronous_is_the_same_code_with_as_many_in_flight_as_in_a_step() -> None:
    scheduler = make()
    for version in range(3):
        groups = start(scheduler, now=version)
        assert names(groups) == [2 * version, 2 * version + 1] and not scheduler.to_start()
        finish(scheduler, groups[0], 1.0, 0.0)
        assert not scheduler.to_start()  # a finished group keeps its place until it is trained: nothing off-policy
        assert scheduler.ready_to_update(1) == ([], "1 of 2 groups are complete")
        finish(scheduler, groups[1], 1.0, 0.0)
        assert scheduler.ready_to_update(1) == (groups, "")
        assert update(scheduler) == groups and [scheduler.staleness(group) for group in groups] == [1, 1]  # after it
    assert scheduler.consumed == [0, 1, 2, 3, 4, 5] and scheduler.version == 3


def test_nothing_starts_or_updates_during_an_update() -> None:
    scheduler = make(groups_in_flight=4)
    for group in start(scheduler):
        finish(scheduler, group, 1.0, 0.0)
    scheduler.update_started(scheduler.ready_to_update(1)[0], 1)
    assert scheduler.to_start() == [] and scheduler.ready_to_update(1) == ([], "an update is running")
    scheduler.update_finished(2, 1)
    assert names(scheduler.to_start()) == [4, 5]


def test_the_group_that_started_first_is_trained_first_and_the_rest_carry_over() -> None:
    scheduler = make(groups_in_flight=5)
    groups = start(scheduler)
    for number in (4, 2, 3):
        finish(scheduler, groups[number], 1.0, 0.0)
    assert names(update(scheduler)) == [2, 3]
    assert scheduler.groups.keys() == {groups[0].id, groups[1].id, groups[4].id}
    finish(scheduler, groups[0], 1.0, 0.0)
    assert names(update(scheduler)) == [0, 4]


def test_surplus_groups_are_kept_and_late_results_ignored() -> None:  # 26
    scheduler = make(groups_in_flight=5, group_timeout=10)
    groups = start(scheduler)
    for group in groups:
        finish(scheduler, group, 1.0, 0.0)
    trained = update(scheduler)
    assert len([g for g in scheduler.groups.values() if g.state == "complete"]) == 3
    assert finish(scheduler, trained[0], 0.5) == ["late"] and finish(scheduler, groups[4], 0.5) == ["duplicate"]
    assert [r["reward"] for r in groups[4].kept] == [1.0, 0.0]
    assert scheduler.counts["rollouts_late"] == scheduler.counts["rollouts_duplicate"] == 1
    assert names(update(scheduler)) == [2, 3]


def test_a_result_that_comes_before_its_group_was_started_is_not_lost() -> None:
    scheduler = make(groups_per_step=1)
    (group,) = scheduler.to_start()
    assert finish(scheduler, group, 1.0, 0.0) == ["early", "early"]
    scheduler.group_started(group, 0)
    assert scheduler.ready_to_update(0)[0] == [group] and scheduler.counts["rollouts_kept"] == 2


# When to switch


def turn(scheduler: Scheduler, now: float, switch_seconds: float) -> list[list[int]]:
    """The trainer's turn: the groups of each of its updates. It ends at `now`."""
    updates = []
    while scheduler.ready_to_update(now)[0]:
        updates.append(names(update(scheduler, now)))
    scheduler.engine_resumed(now, switch_seconds)
    return updates


def test_a_turn_makes_updates_as_long_as_groups_are_complete() -> None:
    scheduler = make(groups_in_flight=7)
    groups = start(scheduler)
    for number in (6, 0, 3, 2, 5):
        finish(scheduler, groups[number], 1.0, 0.0)
    assert turn(scheduler, 10, 1) == [[0, 2], [3, 5]] and scheduler.version == 2 and scheduler.switch_seconds == 0.5
    assert scheduler.ready_to_update(10) == ([], "1 of 2 groups are complete")
    scheduler = make()  # synchronous: nothing is left
    for group in start(scheduler):
        finish(scheduler, group, 1.0, 0.0)
    assert turn(scheduler, 10, 1) == [[0, 1]]


@pytest.mark.parametrize("switch_seconds", [0, 3, 30])
def test_a_switch_waits_for_more_groups_only_while_that_costs_less(switch_seconds: float) -> None:
    scheduler = make(groups_per_step=1, groups_in_flight=4)
    finish(scheduler, start(scheduler)[0], 1.0, 0.0)
    assert turn(scheduler, 100, 2 * switch_seconds) == [[0]]  # nothing was known of the costs: at once
    assert scheduler.switch_seconds == switch_seconds
    groups = {group.k: group for group in (*scheduler.groups.values(), *start(scheduler, 100))}
    finish(scheduler, groups[1], 1.0, 0.0, now=101)
    # Three run. One more completes in a second, as the first did: a place for a second, or three for a whole switch?
    for waited in (1, 5, 8.9, 9, 20, 89.9, 90):
        waits = not scheduler.ready_to_update(100 + waited)[0]
        assert waits == (waited < 3 * switch_seconds)
        assert scheduler.ready_to_update(100 + waited, more=False)[0] == [groups[1]]
    finish(scheduler, groups[2], 1.0, 0.0, now=101)
    assert bool(scheduler.ready_to_update(101)[0]) == (switch_seconds == 0)  # two run, one of which is the slower half
    finish(scheduler, groups[3], 1.0, 0.0, now=101)
    assert scheduler.ready_to_update(101)[0] == [groups[1]]  # only the slowest runs: it is not waited for
    assert turn(scheduler, 102, switch_seconds) == [[1], [2], [3]]
    finish(scheduler, groups[4], 1.0, 0.0, now=103)
    assert scheduler.ready_to_update(103)[0] == [groups[4]]  # nothing else runs: an idle engine is not waited for


def test_synchronous_and_smaller_steps_never_wait() -> None:
    scheduler = make(groups_per_step=3, max_refills=0)
    for group in start(scheduler):
        finish(scheduler, group, 1.0, 0.0)
    turn(scheduler, 10, switch_seconds=1000)
    a, b, c = start(scheduler, 10)
    finish(scheduler, a, 1.0, 0.0, now=11)
    finish(scheduler, b, 1.0, 1.0, now=11)
    assert scheduler.ready_to_update(11)[0] == []
    finish(scheduler, c, 1.0, 0.0, now=12)
    assert scheduler.ready_to_update(12)[0] == [a, c]


def test_the_cost_of_a_switch_is_that_of_the_last_ones() -> None:
    scheduler = make()
    for seconds, mean in ((8.0, 4.0), (8.0, 6.0), (2.0, 4.0)):
        for group in start(scheduler):
            finish(scheduler, group, 1.0, 0.0)
        turn(scheduler, 10, seconds)
        assert scheduler.switch_seconds == mean


# Groups in flight


def fly(scheduler: Scheduler, tails: list[float], updates: int = 60) -> list[int]:
    """groups_in_flight after so many updates with each tail: of two rollouts in each group the first takes a second, the
    other too, but in a quarter of the groups `tail` seconds. Updates and switches take no time."""
    draw, ends, now, found = random.Random(0), [], 0.0, []
    for tail in tails:
        goal = scheduler.version + updates
        while scheduler.version < goal:
            for group in start(scheduler, now):
                heapq.heappush(ends, (now + 1, group.k, 0, group))
                heapq.heappush(ends, (now + (tail if draw.random() < 0.25 else 1), group.k, 1, group))
            while scheduler.ready_to_update(now)[0]:
                update(scheduler, now)
                scheduler.engine_resumed(now, 0.0)
            if not scheduler.to_start():
                now, _, index, group = heapq.heappop(ends)
                scheduler.rollout_finished(record(group.id, index, float(index)), now)
        found.append(scheduler.groups_in_flight)
    return found


def test_auto_keeps_as_many_groups_as_keep_a_step_of_rollouts_running() -> None:
    scheduler = make(groups_per_step=8, groups_in_flight="auto")
    assert scheduler.groups_in_flight == 32 and scheduler.max_staleness == 8 and len(scheduler.to_start()) == 32
    none, short, long = fly(scheduler, [1.0, 5.0, 50.0])
    assert none <= 10 < short < long, "no tail: hardly more than synchronous"
    # Of 4 groups one has a rollout that runs alone for 4 (49) seconds: 8 * 2 / 1.5 (8 * 13.25 / 7.125) places, and a few
    # for groups that wait.
    assert 10 <= short <= 14 <= long <= 20


def test_auto_never_exceeds_what_the_bound_on_staleness_allows() -> None:
    for bound, most in ((None, 16), (8, 16), (5, 10), (2, 4), (1, 4), (0, 4)):
        scheduler = make(groups_per_step=4, groups_in_flight="auto", max_staleness=bound)
        assert scheduler.most_in_flight == most and scheduler.groups_in_flight == most
        for _ in range(10):  # one rollout of each group takes a thousand times as long as the other
            groups = start(scheduler, 0)
            for group in groups:
                finish(scheduler, group, 1.0, now=1.0)
                scheduler.rollout_finished(record(group.id, 1, 0.0), 1.0)
                group.started = -1000.0  # the others held it
            while scheduler.ready_to_update(1)[0]:
                update(scheduler, 1.0)
        assert scheduler.groups_in_flight == most


# Groups without a signal


def test_lost_and_dropped_rollouts_shrink_the_group() -> None:  # 19
    scheduler = make(groups_per_step=1, rollouts_per_group=4, max_refills=5)
    (group,) = start(scheduler)
    outcomes = finish(scheduler, group, 1.0, 0.0)
    outcomes += [
        scheduler.rollout_finished(record(group.id, 2, None, "lost"), 1),
        scheduler.rollout_finished(record(group.id, 3, None, "failed"), 1),
    ]
    assert outcomes == ["kept", "kept", "lost", "dropped"]
    assert [r["reward"] for r in update(scheduler)[0].kept] == [1.0, 0.0]
    (group,) = start(scheduler)
    finish(scheduler, group, None, None, None, 1.0)  # a group of one
    assert scheduler.counts["groups_skipped_few"] == 1 and group.state == "skipped" and scheduler.groups == {}
    (group,) = start(scheduler)
    finish(scheduler, group, 0.7, 0.7, 0.7, 0.7)
    assert scheduler.counts["groups_skipped_equal"] == 1


def test_a_failed_rollout_with_reward_zero_counts_and_a_lost_one_never() -> None:
    scheduler = make(groups_per_step=1, max_refills=1)
    (group,) = start(scheduler)
    scheduler.rollout_finished(record(group.id, 0, 0.0, "failed"), 1)
    scheduler.rollout_finished(record(group.id, 1, 1.0), 1)
    assert len(update(scheduler)[0].kept) == 2
    (group,) = start(scheduler)
    scheduler.rollout_finished(record(group.id, 0, 0.0, "lost"), 1)
    scheduler.rollout_finished(record(group.id, 1, float("nan")), 1)
    assert scheduler.counts["rollouts_lost"] == scheduler.counts["rollouts_dropped"] == 1


def test_skipped_groups_are_refilled_up_to_the_limit_then_the_step_is_smaller_and_says_so() -> None:
    scheduler = make(groups_per_step=3, max_refills=1)
    a, b, c = start(scheduler)
    finish(scheduler, a, 1.0, 1.0)
    (d,) = start(scheduler)  # the refill
    finish(scheduler, b, 1.0, 1.0)
    assert start(scheduler) == []  # the limit
    finish(scheduler, d, 1.0, 0.0)
    assert scheduler.ready_to_update(1)[0] == []
    finish(scheduler, c, 1.0, 0.0)
    assert scheduler.ready_to_update(1) == ([c, d], "smaller step: 2 of 3 groups, 2 were skipped")
    update(scheduler)
    assert len(start(scheduler)) == 3  # the next step is whole again
    assert scheduler.counts["groups_skipped_equal"] == 2


def test_every_group_filtered_stops_with_the_reason() -> None:  # 23
    scheduler = make(max_refills=1, max_skipped_steps=3)
    for _ in range(20):
        for group in start(scheduler):
            finish(scheduler, group, 1.0, 1.0)
        groups, why = scheduler.ready_to_update(1)
        assert not groups
        if scheduler.stop_reason():
            break
    assert "all groups were skipped for 3 steps in a row: {'groups_skipped_equal': 9" in scheduler.stop_reason()
    assert scheduler.to_start() == [] and scheduler.counts["steps_skipped"] == 3


def test_a_step_with_a_signal_resets_the_count_of_empty_steps() -> None:
    scheduler = make(groups_per_step=1, max_skipped_steps=2)
    for round_ in range(6):
        (group,) = start(scheduler)
        if round_ % 2:
            finish(scheduler, group, 1.0, 0.0)
            update(scheduler)
        else:
            finish(scheduler, group, 1.0, 1.0)
            assert "were skipped, for the 1. time" in scheduler.ready_to_update(1)[1]
    assert scheduler.stop_reason() == ""


def test_the_data_end_with_a_smaller_step_and_a_named_stop() -> None:
    scheduler = make(max_groups=3)
    for group in start(scheduler):
        finish(scheduler, group, 1.0, 0.0)
    update(scheduler)
    (last,) = start(scheduler)
    assert scheduler.ready_to_update(1) == ([], "0 of 1 groups are complete")
    finish(scheduler, last, 1.0, 0.0)
    assert scheduler.ready_to_update(1)[1].startswith("smaller step: 1 of 2")
    update(scheduler)
    assert scheduler.to_start() == [] and scheduler.stop_reason() == "data exhausted: all 3 groups are finished"
    assert scheduler.ready_to_update(1) == ([], scheduler.stop_reason())


# Staleness


def test_an_update_waits_for_a_running_group_that_it_would_push_over_the_bound() -> None:
    scheduler = make(groups_per_step=1, groups_in_flight=2, max_staleness=2)
    slow = start(scheduler)[0]
    for version in range(2):
        finish(scheduler, [*scheduler.groups.values()][1], 1.0, 0.0)
        assert update(scheduler)[0] is not slow
        start(scheduler)
    finish(scheduler, [*scheduler.groups.values()][1], 1.0, 0.0)
    assert scheduler.version == 2
    assert scheduler.ready_to_update(1) == ([], f"group {slow.id} of version 0 would get older than max_staleness")
    finish(scheduler, slow, 1.0, 0.0)
    assert scheduler.staleness(slow) == 2 and update(scheduler) == [slow]


def test_looking_ahead_keeps_two_slow_groups_from_coming_due_at_once() -> None:
    scheduler = make(groups_per_step=1, groups_in_flight=3, max_staleness=2)
    slow = start(scheduler)[:2]
    finish(scheduler, [*scheduler.groups.values()][2], 1.0, 0.0)
    update(scheduler)  # at version 0; the two slow ones fit into the updates of versions 1 and 2
    start(scheduler)
    finish(scheduler, [*scheduler.groups.values()][2], 1.0, 0.0)
    assert slow[0].id in scheduler.ready_to_update(1)[1]  # at version 1 one of the two has to go
    finish(scheduler, slow[1], 1.0, 0.0)
    assert update(scheduler) == [slow[1]]
    start(scheduler)
    finish(scheduler, slow[0], 1.0, 0.0)
    assert update(scheduler) == [slow[0]] and scheduler.counts["rollouts_stale"] == 0


def test_a_smaller_step_waits_too() -> None:
    scheduler = make(groups_in_flight=4, max_staleness=1)
    first = start(scheduler)
    finish(scheduler, first[3], 1.0, 1.0)
    finish(scheduler, first[0], 1.0, 0.0)
    assert update(scheduler) == [first[0]]  # one of two, since one was skipped
    finish(scheduler, start(scheduler)[0], 1.0, 1.0)
    finish(scheduler, first[1], 1.0, 0.0)
    assert first[2].id in scheduler.ready_to_update(1)[1]  # there is still a place in this step for a group that is due
    finish(scheduler, first[2], 1.0, 0.0)
    assert update(scheduler) == first[1:3]


def restored(version: int, unfinished: list[list[int]], **settings_: Any) -> tuple[Scheduler, list[Group]]:
    scheduler = make(groups_per_step=1, groups_in_flight=2, **settings_)
    scheduler.load_state_dict(
        {"version": version, "next_k": 9, "consumed": [], "unfinished": unfinished, "abandoned": [], "counts": {}, "seen": 0}
    )
    return scheduler, start(scheduler)


def test_nobody_waits_where_waiting_cannot_help() -> None:
    scheduler, (first, second) = restored(1, [[1, 0, 0], [2, 0, 0]], max_staleness=1)  # both due now, with one place
    finish(scheduler, first, 1.0, 0.0)
    assert scheduler.ready_to_update(1)[0] == [first] and second.state == "running"
    scheduler, (_, fresh) = restored(5, [[1, 0, 0]], max_staleness=2)  # the old one is past the bound already
    finish(scheduler, fresh, 1.0, 0.0)
    assert scheduler.ready_to_update(1)[0] == [fresh]


def test_a_group_sampled_at_3_and_consumed_for_7_under_limit_2_is_dropped_and_counted() -> None:  # 25
    scheduler = make(groups_per_step=1, max_staleness=2, version=3)
    (group,) = start(scheduler)
    scheduler.version = 7
    finish(scheduler, group, 1.0, 0.0, version_min=3, version_max=3)
    assert scheduler.ready_to_update(1)[0] == [] and group.state == "dropped"
    assert scheduler.counts["groups_stale"] == 1 and scheduler.counts["rollouts_stale"] == 2
    assert scheduler.skipped == 0 and len(scheduler.to_start()) == 1  # not a group without a signal: another one starts


def test_only_the_stale_rollouts_of_a_group_are_dropped() -> None:
    scheduler = make(groups_per_step=1, rollouts_per_group=3, max_staleness=2, version=5)
    (group,) = start(scheduler)
    for index, oldest in enumerate((2, 3, 5)):
        scheduler.rollout_finished(record(group.id, index, float(index), version_min=oldest, version_max=5), 1)
    assert scheduler.staleness(group) == 2
    assert [r["reward"] for r in update(scheduler)[0].kept] == [1.0, 2.0] and scheduler.counts["rollouts_stale"] == 1


def test_a_carried_over_group_that_gets_too_old_is_dropped_at_the_update() -> None:
    scheduler = make(groups_per_step=1, groups_in_flight=2, max_staleness=1, version=4)
    groups = start(scheduler)
    finish(scheduler, groups[0], 1.0, 0.0)
    finish(scheduler, groups[1], 1.0, 0.0, version_min=3)  # as after a restart
    update(scheduler)
    assert groups[1].state == "dropped" and scheduler.counts["groups_stale"] == 1


@pytest.mark.parametrize("base", [0, 100])
def test_the_bound_after_a_resume_is_that_of_a_fresh_run(base: int) -> None:  # 25
    scheduler = make(groups_per_step=1, groups_in_flight=2, max_staleness=2)
    scheduler.load_state_dict(
        {"version": base, "next_k": base, "consumed": [], "unfinished": [], "abandoned": [], "counts": {}, "seen": 0}
    )
    slow = start(scheduler)[0]
    for version in range(3):
        finish(scheduler, [*scheduler.groups.values()][1], 1.0, 0.0)
        waits = not scheduler.ready_to_update(1)[0]
        assert waits == (version == 2)
        if not waits:
            update(scheduler)
            start(scheduler)
    assert scheduler.groups[slow.id].version == base


def test_the_default_bound_and_impossible_settings() -> None:
    assert make(groups_per_step=4, groups_in_flight=4).max_staleness == 2
    assert make(groups_per_step=4, groups_in_flight=10).max_staleness == 5
    for wrong, message in (
        ({"groups_in_flight": 1}, "groups_in_flight 1"),
        ({"rollouts_per_group": 1}, "rollouts_per_group 1"),
        ({"groups_per_step": 0}, "groups_per_step 0"),
        ({"max_skipped_steps": 0}, "max_skipped_steps"),
        ({"groups_in_flight": 5, "max_staleness": 1}, "max_staleness 1 must be at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**wrong)
    assert make(groups_in_flight=5, max_staleness=2).max_staleness == 2


# Time


def test_a_rollout_that_never_ends_is_timed_out_and_its_group_goes_on_without_it() -> None:  # 23
    scheduler = make(groups_per_step=1, rollouts_per_group=3, group_timeout=100)
    (group,) = start(scheduler, now=50)
    finish(scheduler, group, 1.0, 0.0)
    assert scheduler.ready_to_update(149.9)[0] == []
    assert scheduler.ready_to_update(150)[0] == [group]
    assert scheduler.counts["groups_timed_out"] == scheduler.counts["rollouts_timed_out"] == 1
    assert scheduler.rollout_finished(record(group.id, 2, 1.0), 151) == "late" and len(group.kept) == 2
    update(scheduler, 152)
    (group,) = start(scheduler, now=152)
    assert scheduler.ready_to_update(252)[0] == [] and scheduler.counts["groups_skipped_few"] == 1


def test_time_spent_in_updates_does_not_count() -> None:
    scheduler = make(groups_per_step=1, groups_in_flight=2, group_timeout=10)
    quick, slow = start(scheduler)
    finish(scheduler, quick, 1.0, 0.0)
    update(scheduler, now=5, seconds=1000)
    assert scheduler.ready_to_update(1009.9)[0] == [] and scheduler.counts["groups_timed_out"] == 0
    scheduler.ready_to_update(1010)
    assert scheduler.counts["groups_timed_out"] == 1


def test_an_update_waits_for_a_running_evaluation_but_not_for_ever() -> None:
    scheduler = make(groups_per_step=1, evaluation_timeout=10)
    (group,) = start(scheduler)
    scheduler.evaluation_started(["eval.0.0", "eval.0.1"], 0)
    finish(scheduler, group, 1.0, 0.0)
    assert scheduler.ready_to_update(1) == ([], "an evaluation is running: 2 rollouts left")
    assert scheduler.rollout_finished(record("eval.0", 0, 1.0, kind="eval"), 1) == "evaluation"
    assert scheduler.rollout_finished(record("eval.0", 0, 1.0, kind="eval"), 1) == "late"
    assert scheduler.rollout_finished(record(group.id, 0, 1.0, kind="eval"), 1) == "late" and len(group.kept) == 2
    assert scheduler.ready_to_update(9.9)[0] == [] and scheduler.evaluating
    assert scheduler.ready_to_update(10)[0] == [group] and not scheduler.evaluating
    assert scheduler.counts["evaluation_timed_out"] == 1


# Restarts and the order of the data


def test_every_epoch_visits_each_task_once_in_its_own_order() -> None:
    orders = [[task_order(7, 50, epoch * 50 + i) for i in range(50)] for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders) and len({tuple(order) for order in orders}) == 3
    assert orders[0] == [task_order(7, 50, i) for i in range(50)] != [task_order(8, 50, i) for i in range(50)]
    assert task_order(7, 5, 3) == task_order(7, 5, 3) and [task_order(0, 1, k) for k in range(3)] == [0, 0, 0]


def test_ids_of_two_data_sets_never_meet() -> None:  # 17
    datasets = ["math", "code", "a-b", "a_b", "a.b", "x" * 90, "x" * 91, "späße"]
    ids = [make(dataset=dataset).to_start()[0].id for dataset in datasets]
    assert len(set(ids)) == len(datasets)
    assert all(
        set(one) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.") and len(one) < 60
        for one in ids
    )


def test_a_restart_runs_unfinished_groups_first_and_takes_what_the_gateway_kept() -> None:
    before = make(groups_in_flight=4)
    groups = start(before)
    for group in groups[1:3]:
        finish(before, group, 1.0, 0.0)
    update(before)
    start(before)
    state = json.loads(json.dumps(before.state_dict()))

    after = make(groups_in_flight=4)
    after.load_state_dict(state)
    for group in groups:  # the gateway's log again, from its beginning
        outcomes = finish(after, group, 1.0, 0.0, version_min=0, version_max=0)
        assert outcomes == (["late"] * 2 if group.k in (1, 2) else ["early"] * 2)
    assert names(after.to_start()) == [0, 3, 4, 5] and [g.version for g in after.to_start()] == [0, 0, 1, 1]
    assert [g.id for g in after.to_start()] == [g.id for g in before.groups.values()]
    start(after)
    assert names(update(after)) == [0, 3] and after.consumed == [1, 2, 0, 3] and names(after.to_start()) == [6, 7]


def test_tokens_of_an_abandoned_branch_are_never_trained_and_the_task_runs_again() -> None:
    scheduler = make(groups_per_step=1, groups_in_flight=2)
    scheduler.load_state_dict(
        {"version": 8, "next_k": 20, "consumed": [], "unfinished": [[19, 0, 7]], "abandoned": [], "counts": {}, "seen": 0}
    )
    old, new = scheduler.to_start()
    assert finish(scheduler, new, 1.0, 0.0, version_min=8, version_max=9) == ["early", "early"]
    scheduler.group_started(old, 0)
    assert finish(scheduler, old, 1.0, 0.0, version_min=7, version_max=8) == ["kept", "kept"]
    update(scheduler)  # version 9: the number 9 of the abandoned branch must not pass now
    scheduler.group_started(new, 0)
    assert (
        scheduler.counts["rollouts_abandoned"] == 2 and new.state == "dropped" and scheduler.counts["groups_rerun"] == 1
    )
    again = scheduler.to_start()[0]
    assert again.k == 20 and again.id == new.id + "r1" and again.version == 9
    start(scheduler)
    finish(scheduler, again, 1.0, 0.0)
    assert update(scheduler) == [again]
    state = scheduler.state_dict()
    assert state["consumed"] == [19, 20] and state["next_k"] == 22
    later = make(groups_per_step=1, groups_in_flight=2)  # a second restart, now beyond version 9
    later.load_state_dict(state)
    assert finish(later, Group(new.id[:-2] + "21", 21), 1.0, version_min=10) == ["early"]
    assert (
        later.rollout_finished(record(new.id, 0, 1.0, version_max=9) | {"group": later.to_start()[0].id}, 0) == "early"
    )
    assert later.early[later.to_start()[0].id][-1]["status"] == "abandoned"


def test_a_late_result_that_a_restart_takes_is_counted_once() -> None:
    scheduler = make(groups_per_step=1, groups_in_flight=2, rollouts_per_group=3, group_timeout=10)
    first, second = start(scheduler)
    for group in (first, second):
        finish(scheduler, group, 1.0, 0.0)
    assert scheduler.ready_to_update(10)[0] == [first]  # both have timed out
    late = record(second.id, 2, 1.0, seq=5)
    assert scheduler.rollout_finished(late, 11) == "late" and scheduler.rollout_finished(late, 11) == "duplicate"
    assert update(scheduler, 12) == [first] and len(second.kept) == 2 and scheduler.counts["rollouts_late"] == 1
    after = make(groups_per_step=1, groups_in_flight=2, rollouts_per_group=3, group_timeout=10)
    after.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert start(after)[0].id == second.id
    assert finish(after, second, 1.0, 0.0) == ["kept", "kept"] and after.rollout_finished(late, 1) == "kept"
    assert len(update(after)[0].kept) == 3 and after.counts["rollouts_late"] == 0 and after.counts["rollouts_kept"] == 5


def test_a_group_that_was_run_again_keeps_its_id_over_a_restart() -> None:
    scheduler = make(groups_per_step=1)
    (group,) = start(scheduler)
    finish(scheduler, group, 1.0, 0.0, version_max=3)
    state = scheduler.state_dict()
    after = make(groups_per_step=1)
    after.load_state_dict(state)
    assert finish(after, group, 1.0, 0.0) == ["late", "late"]  # the attempt before
    assert [g.id for g in after.to_start()] == [group.id + "r1"]


# Random runs


class World:
    """Gateway and engine of a simulated run, which outlive the trainer: rollouts that end, fail, hang, at any time."""

    def __init__(self, draw: random.Random, rollouts: int, trouble: float, signal: float, versions: bool) -> None:
        self.draw, self.rollouts, self.trouble, self.signal, self.versions = draw, rollouts, trouble, signal, versions
        self.events: list[tuple[float, str, int]] = []  # (end, group, index)
        self.groups: dict[str, dict[int, Record]] = {}
        self.finished: list[Record] = []

    def post(self, group: str, now: float, version: int) -> None:
        if group not in self.groups:  # idempotent
            self.groups[group] = {}
            for index in range(self.rollouts):
                self.groups[group][index] = {**record(group, index, None, "running"), "tokens": {version}}
                seconds = self.draw.paretovariate(1.2) if self.draw.random() > self.trouble / 3 else 1e9
                heapq.heappush(self.events, (now + seconds, group, index))

    def advance(self, limit: float) -> float:
        """To the next end of a rollout, at most to the limit."""
        if not self.events or self.events[0][0] > limit:
            return limit
        end, group, index = heapq.heappop(self.events)
        one, chance = self.groups[group][index], self.draw.random()
        one["status"] = "lost" if chance < self.trouble / 3 else "failed" if chance < self.trouble else "succeeded"
        if one["status"] == "succeeded" or one["status"] == "failed" and self.draw.random() < 0.5:
            one["reward"] = float(self.draw.random() < 0.5) if self.draw.random() < self.signal else 1.0
        if self.versions:
            one["version_min"], one["version_max"] = min(v % 1000 for v in one["tokens"]), max(
                v % 1000 for v in one["tokens"]
            )
        self.finished.append(one | {"seq": len(self.finished) + 1})
        return end

    def hold(self, seconds: float, version: int) -> None:
        """An update: calls are held meanwhile, and tokens of the new version follow."""
        self.events = [(end + seconds, group, index) for end, group, index in self.events]
        for _, group, index in self.events:
            self.groups[group][index]["tokens"].add(version)

    def abandon(self, branch: int, version: int, now: float) -> None:
        """The trainer died and resumes from `version`: attempts that hold a later token start again."""
        for _, group, index in self.events:
            one = self.groups[group][index]
            if max(v % 1000 for v in one["tokens"]) > version:
                one["tokens"] = set()
            one["tokens"].add(branch * 1000 + version)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 4),
    st.integers(0, 9),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.2, 0.9]),
    st.sampled_from([0.05, 0.5, 1.0]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, 0.0, 1.0, 100.0]),
)
@example(14474, 4, 5, 1, 0.2, 1.0, True, True, False, None)  # a rerun of an abandoned branch that the surviving one does not need
def test_any_run_progresses_or_stops_with_a_named_reason(
    seed: int,
    per_step: int,
    more: int,
    refills: int,
    trouble: float,
    signal: float,
    restarts: bool,
    tight: bool,
    auto: bool,
    switch: float | None,
) -> None:
    draw = random.Random(seed)
    in_flight = per_step + more
    bound = -(-in_flight // per_step) - 1 if tight else None
    common: dict[str, Any] = {
        "groups_per_step": per_step,
        "groups_in_flight": "auto" if auto else in_flight,
        "rollouts_per_group": draw.randint(2, 4),
        "max_refills": refills,
        "max_staleness": bound,
        "max_groups": draw.choice([float("inf"), 17]),
        "group_timeout": 60.0,
        "evaluation_timeout": 60.0,
    }
    scheduler = Scheduler(**common)
    world = World(draw, common["rollouts_per_group"], trouble, signal, versions=restarts)
    now, seq, branch, forks = 0.0, 0, 0, {0: 0}  # forks: version at which each branch began
    checkpoint, idle, crashes, turns = scheduler.state_dict(), 0, 0, 0
    while scheduler.version < 25 and not scheduler.stop_reason():
        for group in scheduler.to_start():
            world.post(group.id, now, branch * 1000 + scheduler.version)
            scheduler.group_started(group, now)
        most = scheduler.most_in_flight or in_flight
        assert len(scheduler.groups) <= most and per_step <= scheduler.groups_in_flight <= most
        assert -(-most // per_step) - 1 <= scheduler.max_staleness
        groups, why = scheduler.ready_to_update(now)
        assert groups or why
        if "another step's" in why:
            check_wait(scheduler, now)
        if groups:
            idle, began = 0, now
            while groups:
                check_step(scheduler, groups, branch, forks)
                scheduler.update_started(groups, now)
                now += draw.uniform(0, 20)
                scheduler.update_finished(now, scheduler.version + 1)
                if draw.random() < 0.3:
                    checkpoint = json.loads(json.dumps(scheduler.state_dict()))
                goes_on = switch is not None and draw.random() < 0.8 and scheduler.version < 25
                groups = scheduler.ready_to_update(now)[0] if goes_on else []
                turns += bool(groups)
            if switch is not None:
                seconds = draw.uniform(0, 2 * switch)
                now += seconds
                scheduler.engine_resumed(now, seconds)
            world.hold(now - began, branch * 1000 + scheduler.version)
            if draw.random() < 0.1 and not scheduler.evaluating:
                scheduler.evaluation_started([f"eval.{scheduler.version}.0"], now)
        elif restarts and crashes < 4 and draw.random() < 0.02:
            crashes += 1
            branch += 1
            scheduler = Scheduler(**common)
            scheduler.load_state_dict(checkpoint)
            forks[branch], seq = scheduler.version, 0
            world.abandon(branch, scheduler.version, now)
        else:
            idle += 1
            now = world.advance(now + 15.0)
        for one in world.finished[seq:]:
            scheduler.rollout_finished(dict(one), now)
        seq = len(world.finished)
        assert idle < 3000, f"no progress: {why}"
    if in_flight == per_step and not (auto or restarts):
        assert turns == 0  # synchronous: a turn is one update
    if not restarts:
        assert scheduler.counts["rollouts_stale"] == 0  # the look ahead never lets one become too old
    assert len(set(scheduler.consumed)) == len(scheduler.consumed)
    fates = ("kept", "lost", "dropped", "abandoned", "late", "duplicate")  # each is counted once, whatever was restarted
    held = sum(map(len, scheduler.early.values()))
    assert "rollouts_early" not in scheduler.counts and sum(scheduler.counts[f"rollouts_{fate}"] for fate in fates) + held == len(world.finished)
    assert (
        scheduler.version == 25
        or "exhausted" in scheduler.stop_reason()
        or "skipped for 3 steps" in scheduler.stop_reason()
    )
    if "skipped" in scheduler.stop_reason():
        assert scheduler.counts["groups_skipped_equal"] + scheduler.counts["groups_skipped_few"] >= 3


def check_wait(scheduler: Scheduler, now: float) -> None:
    """A switch is put off only while something runs that is worth it, for a time that is bounded."""
    states = [group.state for group in scheduler.groups.values()]
    assert states.count("complete") >= scheduler.groups_per_step and states.count("running") >= 2
    assert now - scheduler.engine_start < states.count("running") * scheduler.switch_seconds
    assert scheduler.ready_to_update(now, more=False)[0]
    assert scheduler.ready_to_update(now + len(states) * scheduler.switch_seconds)[1].count("another step's") == 0


def check_step(scheduler: Scheduler, groups: list[Group], branch: int, forks: dict[int, int]) -> None:
    """What must hold of every update, from the tokens themselves and not from what the scheduler was told."""
    complete = [group for group in scheduler.groups.values() if group.state == "complete"]
    assert groups == complete[: scheduler.groups_per_step]
    for group in groups:
        assert len({one["reward"] for one in group.kept}) >= 2
        assert group.k not in scheduler.consumed
        for one in group.kept:
            assert scheduler.version - min(v % 1000 for v in one["tokens"]) <= scheduler.max_staleness
            for token in one["tokens"]:
                origin, version = divmod(token, 1000)
                later = [forks[b] for b in range(origin + 1, branch + 1)]
                assert all(version <= fork for fork in later), "a token of an abandoned branch is trained"


def test_memory_does_not_grow_with_the_run() -> None:
    scheduler = make(groups_per_step=1, groups_in_flight=3, max_groups=500, max_refills=3)
    draw = random.Random(0)
    while not scheduler.stop_reason():
        for group in start(scheduler):
            finish(scheduler, group, 1.0, float(draw.random() < 0.5))
        if scheduler.ready_to_update(0)[0]:
            update(scheduler)
    assert not scheduler.groups and not scheduler.early and not scheduler.restarts
    assert Counter(scheduler.consumed).most_common(1)[0][1] == 1 and len(json.dumps(scheduler.state_dict())) < 4000

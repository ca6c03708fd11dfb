"""Turns -> rows: the worked examples, the field cases, a slow reference, and random trees of conversations."""

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trajectory
from trajectory import Sample, Turn, after_reply, assemble, continued

P1, R1, R2, R3 = [1, 2, 3], [10, 11], [20, 21], [30]
Q1, Q1R, Q2R = [7, 8], [70], [71, 72]


def turn(prompt: list[int], response: list[int], version: int = 0, **more: Any) -> Turn:
    """A turn whose log-probs say which token they belong to."""
    return Turn(prompt, response, [-token / 100 for token in response], [version] * len(response), **more)


def trained(samples: list[Sample]) -> list[list[int]]:
    return [[token for token, is_trained in zip(sample.ids, sample.mask) if is_trained] for sample in samples]


def masks(samples: list[Sample]) -> list[str]:
    return ["".join("01"[value] for value in sample.mask) for sample in samples]


# The worked examples of the design


def test_a_continued_conversation_is_one_row() -> None:
    samples, counts = assemble([turn(P1, R1, 4), turn(P1 + R1 + [99] + [98], R2, 5)])
    assert [sample.ids for sample in samples] == [P1 + R1 + [99, 98] + R2]
    assert masks(samples) == ["000110011"]
    assert samples[0].logprobs == [0, 0, 0, -0.10, -0.11, 0, 0, -0.20, -0.21]
    assert samples[0].versions == [-1, -1, -1, 4, 4, -1, -1, 5, 5]
    assert samples[0].turns == [0, 1] and not any(counts.values())


def test_interleaved_conversations_are_two_rows() -> None:
    turns = [turn(P1, R1), turn(Q1, Q1R), turn(P1 + R1 + [99], R2), turn(Q1 + Q1R + [55], Q2R)]
    samples, counts = assemble(turns)
    assert [sample.ids for sample in samples] == [P1 + R1 + [99] + R2, Q1 + Q1R + [55] + Q2R]
    assert masks(samples) == ["00011011", "001011"]
    assert counts["fork"] == 1


def test_a_branch_reads_the_shared_part_again_as_context() -> None:
    samples, counts = assemble([turn(P1, R1), turn(P1 + R1 + [90], R2), turn(P1 + R1 + [91], R3)])
    assert [sample.ids for sample in samples] == [P1 + R1 + [90] + R2, P1 + R1 + [91] + R3]
    assert masks(samples) == ["00011011", "0000001"]
    assert counts["fork"] == 1


def test_a_rewritten_history_starts_a_row() -> None:
    samples, counts = assemble([turn(P1, R1), turn([5, 6], R2)])
    assert masks(samples) == ["00011", "0011"] and counts["fork"] == 1


def test_the_longest_earlier_prefix_wins_not_the_last() -> None:
    longer, shorter = turn(P1, R1), turn(P1, R1[:1])  # [1 2 3 | 10 11] and [1 2 3 | 10]: both are prefixes
    for turns, expect in (([longer, shorter], [[0, 2], [1]]), ([shorter, longer], [[0], [1, 2]])):
        samples, _ = assemble([*turns, turn(P1 + R1 + [90], R2)])
        assert [sample.turns for sample in samples] == expect


def test_equal_turns_are_separate_samples_and_each_is_continued_once() -> None:
    again = turn(P1, R1)
    samples, counts = assemble([turn(P1, R1), again, turn(P1, R1), turn(P1 + R1 + [90], R2), turn(P1 + R1 + [91], R3)])
    assert [sample.turns for sample in samples] == [[0, 3], [1, 4], [2]]
    assert trained(samples) == [R1 + R2, R1 + R3, R1] and counts["fork"] == 2


# Field cases


def test_retokenized_history_forks_and_foreign_ids_are_not_trained() -> None:  # 11
    samples, _ = assemble([turn([10], [21, 22]), turn([10, 23, 30], [40])])
    assert trained(samples) == [[21, 22], [40]]


def test_stripped_thinking_forks_and_is_trained_once() -> None:  # 12
    samples, _ = assemble([turn(P1, [50, 51, 52, 9]), turn(P1 + [9, 60], [61])])
    assert trained(samples) == [[50, 51, 52, 9], [61]]


def test_compaction_gives_three_rows() -> None:  # 13
    turns = [turn(P1, R1), turn(P1 + R1 + [90], R2), turn([40, 41], [42]), turn([1, 42, 43], R3)]
    samples, counts = assemble(turns)
    assert trained(samples) == [R1 + R2, [42], R3] and counts["fork"] == 2


def test_overlong_rows_are_cut_together_and_counted() -> None:  # 14
    samples, counts = assemble([turn([1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15])], max_tokens=8)
    (row,) = samples
    assert row.ids == [1, 2, 3, 4, 5, 10, 11, 12] and masks(samples) == ["00000111"]
    assert row.logprobs == [0] * 5 + [-0.10, -0.11, -0.12] and row.versions == [-1] * 5 + [0] * 3
    assert counts["cut"] == 1 and counts["cut_tokens"] == 3
    assert assemble([turn([1] * 5, [10] * 3)], max_tokens=8)[1]["cut"] == 0  # just fits


def test_a_row_with_nothing_left_to_train_is_left_out_and_counted() -> None:
    samples, counts = assemble([turn([1] * 9, [10]), turn([2], [20])], max_tokens=8)
    assert trained(samples) == [[20]]
    assert counts == {"fork": 1, "untrainable": 0, "undelivered": 0, "cut": 1, "cut_tokens": 1, "empty": 1}


def test_the_text_of_an_echo_does_not_matter_only_ids() -> None:  # 15: "" and null render to the same ids
    turns = [
        Turn.from_record({"prompt_ids": P1, "response_ids": R1, "logprobs": [-1, -1], "message": {"content": content}})
        for content in ("", None)
    ]
    for first in turns:
        assert len(assemble([first, turn(P1 + R1 + [90], R2)])[0]) == 1


def test_a_single_token_response_is_trained() -> None:  # 16
    assert trained(assemble([turn(P1, [2])])[0]) == [[2]]


def test_a_turn_without_logprobs_is_context_and_the_others_train() -> None:  # 21
    for missing in range(8):
        turns, ids = [], [1]
        for number in range(8):
            turns.append(turn(list(ids), [100 + number]))
            ids += [100 + number, 50]
        turns[missing].logprobs = None
        samples, counts = assemble(turns)
        assert trained(samples) == [[100 + number for number in range(8) if number != missing]]
        assert samples[0].ids == ids[:-1] and counts["untrainable"] == 1 and counts["fork"] == 0


@pytest.mark.parametrize(
    "logprobs, versions",
    [
        (None, None),
        ([-1.0], None),
        ([-1.0] * 3, None),
        ([-1.0, float("nan")], None),
        ([-1.0, float("-inf")], None),
        ([-1.0, None], None),
        ([-1.0, "x"], None),
        ([-1.0, -1.0], [1]),
    ],
)
def test_what_does_not_match_is_never_repaired(logprobs: Any, versions: Any) -> None:
    samples, counts = assemble([Turn(P1, R1, logprobs, versions), turn(P1 + R1 + [9], R2)])
    assert trained(samples) == [R2] and counts["untrainable"] == 1


def test_nothing_precedes_the_first_token_so_it_cannot_be_trained() -> None:
    samples, counts = assemble([turn([], R1)])
    assert samples == [] and counts["untrainable"] == counts["empty"] == 1


def test_an_undelivered_turn_trains_only_if_a_later_turn_continues_it() -> None:
    lost = turn(P1, R1, delivered=False)
    samples, counts = assemble([lost, turn(P1, R3)])  # the harness came back with the same prompt and got another reply
    assert trained(samples) == [R3] and counts["undelivered"] == 1 and counts["empty"] == 1
    samples, counts = assemble([lost, turn(P1 + R1 + [9], R2)])
    assert trained(samples) == [R1 + R2] and counts["undelivered"] == 0


def test_no_turns_and_empty_responses() -> None:
    assert assemble([])[0] == []
    samples, counts = assemble([turn(P1, []), turn(P1 + [9], R2)])
    assert trained(samples) == [R2] and samples[0].ids == P1 + [9] + R2 and counts["fork"] == 0


def test_turns_are_not_changed() -> None:
    turns = [turn(P1, R1), turn(P1 + R1 + [90], R2)]
    before = [(list(t.prompt_ids), list(t.response_ids), list(t.logprobs or [])) for t in turns]
    assemble(turns, max_tokens=4)
    assert before == [(t.prompt_ids, t.response_ids, t.logprobs) for t in turns]


# Properties


def slow_reference(turns: list[Turn]) -> list[tuple[list[int], list[int]]]:
    """Rows as (ids, positions of turns) by the rule as it is written, one id at a time."""
    rows: list[tuple[list[int], list[int]]] = []
    for position, one in enumerate(turns):
        best: tuple[list[int], list[int]] | None = None
        for row in rows:
            fits = len(row[0]) <= len(one.prompt_ids) and all(a == b for a, b in zip(row[0], one.prompt_ids))
            if fits and (best is None or len(row[0]) > len(best[0])):
                best = row
        if best is None:
            best = ([], [])
            rows.append(best)
        best[0].extend(one.prompt_ids[len(best[0]) :] + one.response_ids)
        best[1].append(position)
    return rows


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Sub-agents that interleave, branch, repeat and drift. Every sampled token has an id of its own where `unique`."""
    unique = draw(st.booleans())
    counter = iter(range(1000, 10**6))
    states: list[list[int]] = [[1], [2, 3]]
    turns = []
    for _ in range(draw(st.integers(1, 14))):
        prompt = list(draw(st.sampled_from(states)))
        change = draw(st.sampled_from(["", "", "observation", "drift", "strip"]))
        if change == "observation":
            prompt += draw(st.lists(st.integers(4, 6), max_size=3))
        elif change == "drift" and len(prompt) > 1:
            prompt[draw(st.integers(1, len(prompt) - 1))] = 4
        elif change == "strip":
            del prompt[draw(st.integers(1, len(prompt))) :]
        size = draw(st.integers(0, 4))
        response = [next(counter) for _ in range(size)] if unique else draw(st.lists(st.integers(4, 5), max_size=4))
        one = turn(prompt, response, delivered=draw(st.integers(0, 5)) > 0)
        if draw(st.integers(0, 7)) == 0:
            one.logprobs = draw(st.sampled_from([None, [-1.0] * (len(response) + 1)]))
        turns.append(one)
        states.append(prompt + response)
    return turns


@settings(max_examples=400, deadline=None)
@given(conversations(), st.one_of(st.none(), st.integers(1, 20)))
def test_every_sampled_token_is_trained_once_and_nothing_else(turns: list[Turn], limit: int | None) -> None:
    whole, counts = assemble(turns)
    reference = slow_reference(turns)
    assert [(sample.ids, sample.turns) for sample in whole] == [
        row
        for row in reference
        if any(_trains(turns, row[1], n) and turns[p].response_ids for n, p in enumerate(row[1]))
    ]
    assert counts["fork"] == len(reference) - 1
    assert len(whole) + counts["empty"] == len(reference)
    expected: list[tuple[int, float]] = []
    for _, positions in reference:
        for number, position in enumerate(positions):
            if _trains(turns, positions, number):
                expected += zip(turns[position].response_ids, turns[position].logprobs or [])
    got = [
        (token, logprob)
        for sample in whole
        for token, logprob, on in zip(sample.ids, sample.logprobs, sample.mask)
        if on
    ]
    assert got == expected  # in this order, so each once
    for sample in whole:
        assert all(
            on or (logprob == 0 and version == -1)
            for on, logprob, version in zip(sample.mask, sample.logprobs, sample.versions)
        )
    cut, cut_counts = assemble(turns, limit)
    assert all(limit is None or len(sample.ids) <= limit for sample in cut)
    assert sum(sample.trained_tokens for sample in cut) + cut_counts["cut_tokens"] == len(expected)
    kept = iter([(row.ids[:limit], row.mask[:limit], row.logprobs[:limit]) for row in whole if any(row.mask[:limit])])
    assert all((row.ids, row.mask, row.logprobs) == next(kept) for row in cut) and next(kept, None) is None


def _trains(turns: list[Turn], positions: list[int], number: int) -> bool:
    one = turns[positions[number]]
    return one.trainable() and (one.delivered or number + 1 < len(positions))


def _long_rollout(turns: int, tokens: int, agents: int = 1) -> list[Turn]:
    draw = random.Random(0)
    histories = [[draw.randrange(150_000) for _ in range(500)] for _ in range(agents)]
    step, result = (tokens - 500 * agents) // turns, []
    for number in range(turns):
        history = histories[number % agents]
        response = [draw.randrange(150_000) for _ in range(step // 2)]
        result.append(Turn(list(history), response, [-0.5] * len(response), [0] * len(response)))
        history += response + [draw.randrange(150_000) for _ in range(step - step // 2)]
    return result


def test_a_hundred_turns_of_64k_tokens_take_well_under_a_second() -> None:
    for agents in (1, 10):
        turns = _long_rollout(100, 64_000, agents)
        started = time.process_time()
        samples, _ = assemble(turns)
        assert time.process_time() - started < 0.5 and len(samples) == agents


def test_a_thousand_rows_that_differ_late_stay_fast() -> None:
    prompt = list(range(2000))
    turns = [Turn(prompt + [5000 + number], [1, 2, 3] * 4, [-1.0] * 12) for number in range(1000)]
    started = time.process_time()
    samples, _ = assemble(turns)
    assert time.process_time() - started < 3 and len(samples) == 1000


# Records


def test_a_turn_from_the_gateways_record() -> None:
    record = {"index": 0, "prompt_ids": P1, "response_ids": R1, "logprobs": [-1, -2], "versions": [3, 5], "messages": [],
              "finish_reason": "stop", "status": "ok", "error": None}
    turn = Turn.from_record(record)
    assert (turn.prompt_ids, turn.versions) == (P1, [3, 5]) and trained(assemble([turn])[0]) == [R1]


def test_a_row_of_unequal_lengths_cannot_be_made() -> None:
    with pytest.raises(AssertionError, match="unequal"):
        Sample([1, 2], [True], [0.0, 0.0], [0, 0])


# ---- where a prompt continues a history that is encoded in another way

SPELLING = {index: piece for index, piece in enumerate(["a", "b", "c", "ab", "bc", "abc", "ca", "<eot>", "<", "eot>", ""])}
EOT = 7
pieces = st.lists(st.sampled_from(sorted(SPELLING)), max_size=12)


def spell(ids: list[int]) -> str:
    return "".join(SPELLING[token] for token in ids)


def test_continued_worked_examples() -> None:
    known = [3, 2, EOT, 0, EOT]  # ab c <eot> a <eot>
    assert continued([5, EOT, 0, EOT, 1], known, 0, [3, 5], SPELLING) == (5, 4)  # abc <eot> a <eot> | b
    assert continued([5, EOT, 1, EOT, 1], known, 0, [3, 5], SPELLING) == (3, 2)  # the second turn reads otherwise
    assert continued([3, 2, EOT, 1], known, 3, [3, 5], SPELLING) == (3, 3)
    assert continued([0, 4, 8, 9, 1], known, 0, [3], SPELLING) == (3, 4)  # the end of turn spelt in plain ids: same text
    assert continued([3, 4], [3], 1, [1], SPELLING) == (1, 1)
    assert continued([0, 4], [3], 0, [1], SPELLING) == (1, 0)  # a | bc: no id begins after "ab"
    assert continued([1, 4], [3], 0, [1], SPELLING) == (0, 0)


@pytest.mark.parametrize("near", [1, 4])
@given(pieces, pieces, st.sets(st.integers(0, 12)))
def test_continued_is_the_longest_end_with_the_same_text(near: int, prompt: Any, known: Any, marks: set[int]) -> None:
    trajectory.NEAR = near
    ends = sorted(end for end in marks if 0 < end <= len(known))
    same = next((i for i, (a, b) in enumerate(zip(prompt, known)) if a != b), min(len(prompt), len(known)))
    end, position = continued(prompt, known, same, ends, SPELLING)
    longest = max((e for e in ends if spell(prompt).startswith(spell(known[:e]))), default=0)
    assert end == longest
    borders = [j for j in range(len(prompt) + 1) if spell(prompt[:j]) == spell(known[:end])]
    assert position in borders or (position == 0 and not borders)
    if position:  # what the model reads does not change
        assert spell(known[:end] + prompt[position:]) == spell(prompt)


def test_after_reply() -> None:
    assert after_reply([0, EOT, 1, EOT, 2], [0, EOT, 3, 3, EOT]) == 4
    assert after_reply([0, EOT, 1], [0, EOT, 3, 3, EOT]) is None

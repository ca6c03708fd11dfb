"""From the turns of a rollout to training rows.

A harness calls the model many times; each call is logged as a `Turn`: the ids the model read and the ids it sampled.
Where one call's prompt continues what an earlier call read and sampled, both belong in one training row (`Sample`), so
that the shared prefix is computed once. `assemble` does that for any mixture of conversations, in the order of the log.

    P1 r1, P1 r1 o2 r2                    one row    P1 r1 o2 r2          trained: r1, r2 (o2 is context: tool output)
    P1 r1, Q1 q1, P1 r1 o2 r2             two rows   P1 r1 o2 r2 | Q1 q1  sub-agents interleave
    P1 r1, P1 r1 a r2, P1 r1 b r3         two rows   P1 r1 a r2 | P1 r1 b r3, where the second row trains r3 alone
    P1 r1, X r2                           two rows   the history was rewritten (compaction, stripped thinking, drift)

Every sampled token is trained exactly once and nothing else is ever trained. Equal turns are separate samples: replays
and retries are told apart from samples in the gateway, not here.

A harness sends text back, and text re-encoded need not be the ids that were sampled (retokenization). `continued` and
`after_reply` tell the gateway where in a re-rendered prompt the history ends, so that it can put the sampled ids there
before the model reads it; then the next turn continues the row.

Left out: rewards and advantages (advantage.py). Standard library only, so that the gateway can import it too. Pure
functions: nobody waits for anybody.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any


@dataclass
class Turn:
    """One model call. `versions` holds the weight version that sampled each token of `response_ids`."""

    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float] | None  # at the sampling temperature, one for each response id; None: the engine gave none
    versions: list[int] | None = None
    finish_reason: str = "stop"
    index: int = 0
    delivered: bool = True  # False: the reply was never written whole; it trains only if a later turn continues it

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Turn":
        """A turn as the gateway's `GET /rollouts/{id}/turns` gives it; unknown fields are ignored."""
        return cls(**{name: record[name] for name in cls.__dataclass_fields__ if name in record})

    def trainable(self) -> bool:
        """Ids, log-probs and versions match in number, the numbers are finite, and something was read before them."""
        count, logprobs = len(self.response_ids), self.logprobs
        if not self.prompt_ids or logprobs is None or len(logprobs) != count:
            return False
        if self.versions is not None and len(self.versions) != count:
            return False
        return all(isinstance(value, (int, float)) and math.isfinite(value) for value in logprobs)


@dataclass
class Sample:
    """One training row of L tokens: `ids`, `mask`, `logprobs`, `versions` are each [L].

    `mask` is true exactly where a token was sampled and is trained. Elsewhere `logprobs` is 0.0 and `versions` is -1
    (as it is for trained tokens whose engine did not say).
    """

    ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    versions: list[int]
    rollout: str = ""  # the rollout's id, set by whoever knows it
    turns: list[int] = field(default_factory=list)  # positions in the turn list of the turns merged here

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.mask) == len(self.logprobs) == len(self.versions), "row of unequal lengths"

    @property
    def trained_tokens(self) -> int:
        return sum(self.mask)


def assemble(turns: list[Turn], max_tokens: int | None = None) -> tuple[list[Sample], dict[str, int]]:
    """Turns in the order they were logged -> (rows in the order of their first turn, counts by reason).

    A turn extends the longest row that is a prefix of its prompt (the earliest of equals), else it starts a row. Only
    whole rows are candidates: a turn that branches off inside a row reads that part again, as context.

    Counts: `fork` rows beyond the first; `untrainable` turns whose ids and log-probs do not match or are not finite
    (context only, never repaired by guessing); `undelivered` turns whose reply nobody got and nothing continued
    (context only); `cut` rows longer than `max_tokens`; `cut_tokens` the trained tokens lost that way; `empty` rows
    with nothing to train after all this, which are left out (the rollout's reward still counts in its group).

    Cost: one comparison at C speed of each prompt with the row that it continues.
    """
    rows: list[Sample] = []
    counts = dict.fromkeys(("fork", "untrainable", "undelivered", "cut", "cut_tokens", "empty"), 0)
    for position, turn in enumerate(turns):
        prompt, response = turn.prompt_ids, turn.response_ids
        longest_first = sorted(rows, key=lambda row: -len(row.ids))  # stable: the earliest of equal rows comes first
        row = next((row for row in longest_first if _is_prefix(row.ids, prompt)), None)
        if row is None:
            counts["fork"] += bool(rows)
            row = Sample([], [], [], [])
            rows.append(row)
        elif not turns[row.turns[-1]].delivered:
            _train(row, turns[row.turns[-1]])  # this turn proves that the reply before it arrived
        context = prompt[len(row.ids):] + response
        row.ids += context
        row.mask += [False] * len(context)
        row.logprobs += [0.0] * len(context)
        row.versions += [-1] * len(context)
        row.turns.append(position)
        counts["untrainable"] += not turn.trainable()
        if turn.delivered:
            _train(row, turn)
    for row in rows:
        last = turns[row.turns[-1]]
        counts["undelivered"] += not last.delivered and last.trainable()
        if max_tokens is not None and len(row.ids) > max_tokens:
            counts["cut"] += 1
            counts["cut_tokens"] += sum(row.mask[max_tokens:])
            for values in (row.ids, row.mask, row.logprobs, row.versions):
                del values[max_tokens:]
    counts["empty"] = sum(not any(row.mask) for row in rows)
    return [row for row in rows if any(row.mask)], counts


NEAR = 4  # ids after the first that differs in which another text shows


def continued(prompt: Sequence[int], known: Sequence[int], same: int, ends: Iterable[int],
              text: Mapping[int, str]) -> tuple[int, int]:
    """How far a prompt reads like a known sequence -> (end, position): `prompt[:position]` spells what `known[:end]`
    does, for the last possible of the `ends`, where turns of `known` ended.

    `same`: number of leading ids that both share. `text`: what each id spells, such that a sequence spells the
    concatenation (a byte-level vocabulary spells bytes, so that characters that are split over ids are compared too).
    Position 0: the text is the same, but where it ends no id of the prompt begins. (0, 0): nothing is.

        known    "he" "llo" <eot>, prompt "hel" "lo" <eot> "\n": end 3, position 3, and known + "\n" can be sent instead
    """
    later, near = sorted((end for end in ends if end > same), reverse=True), same + NEAR
    ours, theirs = ("".join(text[token] for token in ids[same:near]) for ids in (known, prompt))
    if later and later[-1] > near and not ours.startswith(theirs) and not theirs.startswith(ours):
        later = []  # another text already: not worth to spell it all
    if later:
        pieces = [[text[token] for token in ids[same:]] for ids in (known, prompt)]
        ours, theirs = map("".join, pieces)
        lengths, borders = (list(accumulate(map(len, piece), initial=0)) for piece in pieces)
    for end in later:
        length = lengths[end - same]
        if theirs.startswith(ours[:length]):
            border = bisect_left(borders, length)
            return end, same + border if borders[border] == length else 0
    end = max((end for end in ends if end <= same), default=0)
    return end, end


def after_reply(prompt: Sequence[int], known: Sequence[int]) -> int | None:
    """Where a prompt goes on after the history `known`, which ends with a sampled end-of-turn id, if the template has
    rewritten what is inside the messages of this history, but not their number: after as many end-of-turn ids."""
    ends = (at + 1 for at, token in enumerate(prompt) if token == known[-1])
    return next(islice(ends, known.count(known[-1]) - 1, None), None)


def _is_prefix(ids: list[int], prompt: list[int]) -> bool:
    # The last few ids differ between most rows, so that a row is copied and compared in full only where it will match.
    length = len(ids)
    return prompt[max(0, length - 16):length] == ids[-16:] and prompt[:length] == ids


def _train(row: Sample, turn: Turn) -> None:
    """Marks the last tokens of the row, which are this turn's response, as trained (if the turn is trainable)."""
    start = len(row.ids) - len(turn.response_ids)
    if turn.trainable() and turn.response_ids:
        row.mask[start:] = [True] * len(turn.response_ids)
        row.logprobs[start:] = turn.logprobs or []
        row.versions[start:] = turn.versions or [-1] * len(turn.response_ids)

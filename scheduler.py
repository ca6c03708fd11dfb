"""Which groups to start, when to update, what is too stale: a state machine without I/O and without a clock.

Time comes in as `now` (seconds), facts as events, decisions are read off: the same object runs live and simulated.

    events     group_started(group, now), rollout_finished(record, now) -> outcome, update_started(groups, now),
               update_finished(now, version), engine_resumed(now, switch_seconds), evaluation_started(rollout_ids, now)
    decisions  to_start() -> [Group]: post these (`id`; its task is `task_order(seed, n_tasks, group.k)`)
               ready_to_update(now) -> ([Group], why): train their `kept` records; none: `why` says what is waited for
               stop_reason() -> str, empty while there is something to do
    numbers    counts (a Counter by reason, over the run), staleness(group), version, consumed, evaluating (ids)
    restart    state_dict(), load_state_dict(state); then post to_start() and feed all finished records again, before
               the next decision: our own version will reach the numbers that an abandoned branch has used

Who waits for whom:
- At most `groups_in_flight` groups are running, or complete and not trained (`groups_per_step`: synchronous RL;
  "auto": so many that on average `groups_per_step * rollouts_per_group` rollouts run, however long the tail).
- An update takes the `groups_per_step` complete groups that started first. It waits for a running evaluation, and for
  running groups that would get older than `max_staleness` if younger ones were trained before them.
- The trainer's turn goes on while there are groups for one more update. It begins later, with groups for more updates,
  where that costs less than a switch of engine and trainer (`_one_more`): short updates are not drowned in switches.
- Groups without a signal (equal rewards, fewer than two rewards left) are skipped and replaced, `max_refills` of them
  a step; beyond that the step is smaller; after `max_skipped_steps` empty steps in a row the run stops.
- Nothing waits for ever: `group_timeout` (without the time of updates) ends a group with the rollouts it has,
  `evaluation_timeout` an evaluation. What comes later is ignored and counted.
- Staleness of a token: the version being trained minus the one that sampled it. Rollouts over the bound all the same
  (a restart) are dropped and counted; so are those with tokens of later versions (a branch that a restart abandoned).
"""

import math
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

# A finished rollout: id, group, status, reward, kind, seq (place in the order of ends), version_min and version_max of
# its tokens. Without versions these count as old as its group, which is wrong only after a restart (for a group that
# the gateway had already).
Record = dict[str, Any]
NO_RESULT = ("lost", "abandoned", "late")  # statuses whose reward, if any, says nothing


def task_order(seed: int, n_tasks: int, k: int) -> int:
    """The task of the k-th group of a run: every epoch visits each of `n_tasks` once, in an order of its own."""
    epoch, place = divmod(k, n_tasks)
    return random.Random(f"{seed}/{epoch}").sample(range(n_tasks), n_tasks)[place]


@dataclass(eq=False)
class Group:
    """The rollouts of one task. running -> complete -> consumed; or out of both: skipped (no signal), dropped (stale or
    abandoned)."""

    id: str
    k: int  # place in the data order; the first group of a run is 0
    attempt: int = 0  # how often it had to be run again
    version: int = 0  # of the weights when it started
    started: float = 0.0  # updates since then are taken out: it moves on with them
    seconds: float = 0.0  # that its finished rollouts took, summed
    state: str = "running"
    results: dict[str, Record] = field(default_factory=dict)  # every final record by rollout id
    kept: list[Record] = field(default_factory=list)  # those to train: with a reward, not stale, not abandoned


class Scheduler:
    """See the module's docstring. `max_staleness` None: twice groups_in_flight / groups_per_step, for "auto" 8; "auto"
    keeps to the same rule, read backwards. `max_groups`: all epochs of the data. `dataset` becomes part of the ids, so
    that two data sets never share a group."""

    def __init__(
        self, *, groups_per_step: int, rollouts_per_group: int, groups_in_flight: int | str = 0, max_refills: int = 0,
        max_staleness: int | None = None, max_skipped_steps: int = 3, group_timeout: float = math.inf,
        evaluation_timeout: float = math.inf, max_groups: float = math.inf, dataset: str = "train", version: int = 0,
    ) -> None:
        self.groups_per_step, self.rollouts_per_group = groups_per_step, rollouts_per_group
        most = max(1, (8 if max_staleness is None else max_staleness) / 2)  # auto: at most so many steps' groups
        self.most_in_flight = int(most * groups_per_step) if groups_in_flight == "auto" else 0
        self.groups_in_flight = in_flight = self.most_in_flight or groups_in_flight or groups_per_step
        self.max_refills, self.max_skipped_steps, self.max_groups = max_refills, max_skipped_steps, max_groups
        self.group_timeout, self.evaluation_timeout = group_timeout, evaluation_timeout
        if not in_flight >= groups_per_step >= 1 or rollouts_per_group < 2 or max_skipped_steps < 1:
            raise ValueError(f"groups_per_step {groups_per_step} must be from 1 to groups_in_flight {in_flight}, "
                             f"rollouts_per_group {rollouts_per_group} at least 2, max_skipped_steps at least 1")
        self.max_staleness = -(-2 * in_flight // groups_per_step) if max_staleness is None else max_staleness
        least = -(-in_flight // groups_per_step) - 1  # the youngest group waits until all the others are trained
        if self.max_staleness < least:
            raise ValueError(f"max_staleness {max_staleness} must be at least {least} with groups_in_flight "
                             f"{in_flight} and groups_per_step {groups_per_step}: raise it, or lower groups_in_flight")
        name = re.sub(r"[^A-Za-z0-9_]", "_", dataset)[:24]  # ids of rollouts are limited to [A-Za-z0-9_.]{1,80}
        self.prefix = name if name == dataset else f"{name}_{random.Random(dataset).getrandbits(32):08x}"
        self.version, self.next_k = version, 0  # next_k: the place in the data order
        self.groups: dict[str, Group] = {}  # running and complete, in the order of their start
        self.restarts: list[Group] = []  # to be started before new ones
        self.early: dict[str, list[Record]] = {}  # results of groups that are not started yet, by group id
        self.abandoned: set[str] = set()  # rollouts with tokens of a branch that a restart left
        self.consumed: list[int] = []  # k of each trained group
        self.counts: Counter[str] = Counter()  # of rollouts: each by what became of it in the end
        self.seen = self.known = 0  # seq of the last record, and of the last one that `counts` had before a restart
        self.skipped = self.skipped_steps = 0  # groups without a signal since the last step; empty steps in a row
        self.evaluating: set[str] = set()  # ids of evaluation rollouts that run
        self.update_start: float | None = None
        self.engine_start = -math.inf  # of the engine's turn; -inf: it is the trainer's
        self.evaluation_start = self.switch_seconds = 0.0  # of a switch to the trainer and back, the last ones' mean

    # Decisions

    def to_start(self) -> list[Group]:
        """Groups to post now, those of an earlier run first. Nothing changes before `group_started`."""
        if self.update_start is not None or self.stop_reason():
            return []
        room = max(0, self.groups_in_flight - len(self.groups) - self._unreplaced())
        new = range(self.next_k, int(min(self.next_k + room, self.max_groups)))
        return [*self.restarts, *(Group(self._id(k), k, version=self.version) for k in new)][:room]

    def ready_to_update(self, now: float, more: bool = True) -> tuple[list[Group], str]:
        """Groups to train now, or none and what is waited for. A step that is smaller than asked for says so. `more`:
        whether another update could follow in the same turn."""
        if self.update_start is not None:
            return [], "an update is running"
        self._end_overdue(now)
        if self.evaluating:
            return [], f"an evaluation is running: {len(self.evaluating)} rollouts left"
        complete, wanted = self._in_state("complete"), self.groups_per_step - self._unreplaced()
        if wanted <= 0 and not complete:
            self.skipped, self.skipped_steps = 0, self.skipped_steps + 1
            self.counts["steps_skipped"] += 1
            return [], f"all groups of the step were skipped, for the {self.skipped_steps}. time in a row"
        wanted = max(1, wanted if self._more_data() else min(wanted, len(self.groups)))
        if len(complete) < wanted:
            return [], self.stop_reason() or f"{len(complete)} of {wanted} groups are complete"
        chosen = complete[:self.groups_per_step]
        if blocker := self._blocker(chosen):
            return [], f"group {blocker.id} of version {blocker.version} would get older than max_staleness"
        if more and len(complete) >= self.groups_per_step and self._one_more(len(complete), now):
            return [], f"{len(complete)} groups are complete; another step's cost less than the switches after this one"
        small = f"smaller step: {len(chosen)} of {self.groups_per_step} groups, {self.skipped} were skipped"
        return chosen, "" if len(chosen) == self.groups_per_step else small

    def stop_reason(self) -> str:
        """Why nothing can make progress any more; empty while something can."""
        if self.skipped_steps >= self.max_skipped_steps:
            counts = {name: n for name, n in sorted(self.counts.items()) if name.startswith(("groups_", "rollouts_"))}
            return f"all groups were skipped for {self.skipped_steps} steps in a row: {counts}"
        return "" if self.groups or self._more_data() else f"data exhausted: all {self.next_k} groups are finished"

    def staleness(self, group: Group) -> int:
        """Versions between the oldest token of the group and the weights that are trained now."""
        return max((self.version - _oldest(group, record) for record in group.kept), default=0)

    # Events

    def group_started(self, group: Group, now: float) -> None:
        """A group of `to_start` was posted."""
        assert group.id not in self.groups, f"group {group.id} was started twice"
        self.groups[group.id], group.started = group, now
        self.restarts = [other for other in self.restarts if other is not group]
        self.next_k = max(self.next_k, group.k + 1)
        self.counts["groups_started"] += 1
        for record in self.early.pop(group.id, []):
            self.rollout_finished(record, now)

    def rollout_finished(self, record: Record, now: float) -> str:
        """Takes the final record of a rollout and says what became of it: kept, lost, dropped, abandoned, late,
        duplicate, early (its group is not started yet: held until then), known (settled before a restart),
        evaluation."""
        if (record.get("version_max") or 0) > self.version or record["id"] in self.abandoned:
            self.abandoned.add(record["id"])  # for good, also over restarts: our own version will reach that number
            record = {**record, "status": "abandoned"}
        outcome, seq = self._outcome(record, now), record.get("seq", 0)
        if outcome == "late" and 0 < seq <= self.known:
            return "known"
        self.seen = max(self.seen, seq)
        if outcome != "early":  # which is counted once its group is started
            self.counts[f"rollouts_{outcome}"] += 1
        return outcome

    def _outcome(self, record: Record, now: float) -> str:
        name, group = record["id"], self.groups.get(record["group"])
        if record.get("kind") == "eval":
            running, self.evaluating = self.evaluating, self.evaluating - {name}
            return "evaluation" if name in running else "late"
        if group is None and self._is_to_come(record["group"]):
            self.early.setdefault(record["group"], []).append(record)
            return "early"
        if group is None or name in group.results:
            return "duplicate" if group else "late"
        if group.state != "running":
            record = {**record, "status": "late"}  # the group had timed out; a restart takes it, if it comes before
        group.results[name] = record
        group.seconds += now - group.started
        if len(group.results) == self.rollouts_per_group:
            self._settle(group)
        return _fate(record)

    def update_started(self, groups: list[Group], now: float) -> None:
        """The groups of `ready_to_update` are being trained: they are consumed, whatever comes of it."""
        assert self.update_start is None, "an update is already running"
        self.update_start, self.engine_start = now, -math.inf
        for group in groups:
            assert self.groups.pop(group.id).state == "complete", f"group {group.id} is not complete"
            group.state = "consumed"
            self.consumed.append(group.k)
            self.counts["rollouts_stale"] += _stale(group)
        self.counts["groups_consumed"] += len(groups)
        self.skipped = self.skipped_steps = 0
        if self.most_in_flight and (busy := sum(group.seconds for group in groups)):
            # Little's law: busy / places of those in flight run; the rest wait for their group, an update, or a switch.
            stays = (now - group.started + self.switch_seconds * (self.version - group.version) for group in groups)
            wanted = (self.groups_in_flight + self.groups_per_step * self.rollouts_per_group * sum(stays) / busy) / 2
            self.groups_in_flight = max(self.groups_per_step, min(round(wanted), self.most_in_flight))

    def update_finished(self, now: float, version: int) -> None:
        """The weights `version` sample from now on. To be called before any record with its tokens is fed."""
        assert self.update_start is not None, "no update is running"
        for group in self.groups.values():
            group.started += now - self.update_start  # calls were held: it does not count against their time
        self.update_start, self.version = None, version
        for group in self._in_state("complete"):
            self._settle(group)  # again: some of its tokens may be too old now
        for name in [name for name in self.early if not self._is_to_come(name)]:  # a rerun of another branch
            self.counts["rollouts_late"] += len(self.early.pop(name))

    def engine_resumed(self, now: float, switch_seconds: float) -> None:
        """The trainer's turn is over. `switch_seconds`: of it, for sleep, load, push and wake."""
        self.engine_start, self.switch_seconds = now, (self.switch_seconds + switch_seconds) / 2

    def evaluation_started(self, rollout_ids: list[str], now: float) -> None:
        """Rollouts of kind `eval` were posted. They are never trained, and updates wait for them."""
        self.evaluating, self.evaluation_start = set(rollout_ids), now

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, as JSON: data order, consumed groups, and the groups that run first after a restart."""
        groups = self.groups.values()
        unfinished = [[group.k, group.attempt, group.version] for group in (*groups, *self.restarts)]
        again = Counter(f"rollouts_{_fate(record)}" for group in groups for record in group.results.values())
        counts = self.counts - again - Counter(groups_started=len(groups))
        return {"version": self.version, "next_k": self.next_k, "consumed": list(self.consumed), "seen": self.seen,
                "unfinished": unfinished, "abandoned": sorted(self.abandoned), "counts": dict(counts),
                "groups_in_flight": self.groups_in_flight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """To be called before any event. Unfinished groups start first, under their old ids: the gateway answers with
        the rollouts that it already has."""
        self.version, self.next_k, self.consumed = state["version"], state["next_k"], list(state["consumed"])
        self.counts, self.abandoned = Counter(state["counts"]), set(state["abandoned"])
        self.seen = self.known = state["seen"]
        self.groups_in_flight = state["groups_in_flight"] if self.most_in_flight else self.groups_in_flight
        self.restarts = [Group(self._id(k, again), k, again, version) for k, again, version in state["unfinished"]]

    # Inside

    def _id(self, k: int, attempt: int = 0) -> str:
        return f"{self.prefix}.{k}" + (f"r{attempt}" if attempt else "")

    def _in_state(self, state: str) -> list[Group]:
        return [group for group in self.groups.values() if group.state == state]

    def _is_to_come(self, group_id: str) -> bool:
        match = re.fullmatch(re.escape(self.prefix) + r"\.(\d+)(?:r(\d+))?", group_id)
        k, attempt = (int(match[1]), int(match[2] or 0)) if match else (-1, 0)
        unfinished = (*self.groups.values(), *self.restarts)
        return k >= self.next_k or any(group.k == k and group.attempt <= attempt for group in unfinished)

    def _unreplaced(self) -> int:
        return max(0, self.skipped - self.max_refills)

    def _more_data(self) -> bool:
        return bool(self.restarts) or self.next_k < self.max_groups

    def _one_more(self, complete: int, now: float) -> bool:
        """Whether to wait until there are groups for one more update in the trainer's next turn.

        At the rate at which the complete ones came, the missing ones take missing / complete of the engine's turn. So
        long the places of the complete ones stay empty; a switch of its own would stop the running ones. (The updates
        themselves take as long either way.) The slower half of these is not waited for: the rate says nothing of them.
        """
        running, missing = len(self._in_state("running")), self.groups_per_step - complete % self.groups_per_step
        return 2 * missing <= running and missing * (now - self.engine_start) < running * self.switch_seconds

    def _end_overdue(self, now: float) -> None:
        for group in self._in_state("running"):
            if now - group.started >= self.group_timeout:
                self.counts["groups_timed_out"] += 1
                self.counts["rollouts_timed_out"] += self.rollouts_per_group - len(group.results)
                self._settle(group)
        if self.evaluating and now - self.evaluation_start >= self.evaluation_timeout:
            self.counts["evaluation_timed_out"] += len(self.evaluating)
            self.evaluating = set()

    def _settle(self, group: Group) -> None:
        """All results of a group are in, or the version has moved on: complete, or out for a reason."""
        group.state, results = "complete", group.results.values()
        group.kept = [record for record in results
                      if _has_reward(record) and self.version - _oldest(group, record) <= self.max_staleness]
        if len({record["reward"] for record in group.kept}) > 1:
            return
        del self.groups[group.id]
        group.state, stale = "dropped", _stale(group)
        self.counts["rollouts_stale"] += stale
        if any(record["status"] == "abandoned" for record in results):  # its task is trained in this branch too
            again = group.attempt + 1
            self.restarts.append(Group(self._id(group.k, again), group.k, again, self.version))
            self.counts["groups_rerun"] += 1
        elif stale:
            self.counts["groups_stale"] += 1
        else:
            group.state, self.skipped = "skipped", self.skipped + 1
            self.counts["groups_skipped_equal" if len(group.kept) > 1 else "groups_skipped_few"] += 1

    def _blocker(self, chosen: list[Group]) -> Group | None:
        """The running group that an update with the chosen ones has to wait for.

        Of the groups left over, the i-th in age is trained at version + 1 + i // groups_per_step at the earliest. Where
        that is too late, and a group not younger is running that could take a place in this update, it is waited for.
        (Looking at the next update alone, five old groups could come due at once with place for two.)
        """
        place = {group_id: number for number, group_id in enumerate(self.groups)}
        last = place[chosen[-1].id] if len(chosen) == self.groups_per_step else math.inf
        left = [group for group in self.groups.values()
                if group not in chosen and group.version + self.max_staleness >= self.version]  # others are lost anyway
        left.sort(key=lambda group: group.version)
        for i, group in enumerate(left):
            if self.version + 1 + i // self.groups_per_step > group.version + self.max_staleness:
                return next((g for g in left[:i + 1] if g.state == "running" and place[g.id] < last), None)
        return None


def _has_reward(record: Record) -> bool:
    reward = record.get("reward")
    return record["status"] not in NO_RESULT and reward is not None and math.isfinite(reward)


def _fate(record: Record) -> str:
    return "kept" if _has_reward(record) else record["status"] if record["status"] in NO_RESULT else "dropped"


def _oldest(group: Group, record: Record) -> int:
    version = record.get("version_min")
    return group.version if version is None else version


def _stale(group: Group) -> int:
    return sum(map(_has_reward, group.results.values())) - len(group.kept)

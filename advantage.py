"""Rollout-level advantages, token weights, policy loss: pure functions over tensors (torch only).

Axes: R rollouts, S training rows (a rollout has one or many), N trained tokens of all rows of a micro-batch, one after
the other. Only trained tokens ever reach `policy_loss`: the rest is left out by selection, since NaN x 0 is NaN.

    group_advantages(rewards [R], groups [R]) -> [R]         credit, once for a rollout
    token_weights(trained_tokens [S], rollouts [S]) -> [S]   what each token of a row counts, once for an optimizer step
    policy_loss(logprobs [N], ...) -> (loss, metrics)        for each micro-batch; losses and gradients simply add up
    summarize([metrics, ...]) -> dict                        metrics of all micro-batches (and ranks) as means

The weights carry the whole normalization and are computed before the update is split, so that any split of whole rows
into micro-batches and ranks gives the same gradient. Ranks: FSDP averages gradients, so the caller scales the loss by
their number. Left out: entropy, value functions, length penalties.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ADVANTAGES = ("grpo", "dr_grpo", "rloo", "maxrl")
WEIGHTS = ("rollout_mean", "token_mean", "constant")
RATIOS = ("token", "gspo")
IMPORTANCES = ("token", "sequence", "mask", "none")
EXPONENT_LIMIT = 20.0  # of log-ratios before exp, so that one broken token cannot make the loss inf or NaN


def group_advantages(rewards: Tensor | Sequence[float], groups: Tensor | Sequence[object],
                     method: str = "grpo") -> Tensor:
    """Advantages [R] (float32, on the device of `rewards`) from rewards [R] and the group of each rollout [R].

    With mean and population standard deviation taken over the rollout's group, in float64:
    `grpo` (r - mean) / std (DeepSeekMath); `dr_grpo` r - mean (Dr. GRPO); `rloo` r - mean of the others (RLOO);
    `maxrl` (r - mean) / mean (MaxRL; needs a positive mean). Exactly 0 in a group of one and where all rewards are
    equal: such a group teaches nothing. A group id may be anything hashable that no other data set uses.
    Raises ValueError for rewards that are not finite, shapes that do not fit, an unknown method.
    """
    _one_of("advantage", method, ADVANTAGES)
    values = torch.as_tensor(rewards, dtype=torch.float64)
    numbers, labels = _numbered(groups, values, "rewards and group ids must be [R]")
    if not values.isfinite().all():
        raise ValueError(f"rewards must be finite numbers, got {values.tolist()}: correct the verifier")
    advantages = torch.zeros_like(values)
    for number, label in enumerate(labels):
        group = values[numbers == number]
        if (group != group[0]).any():  # at least two rollouts that differ
            advantages[numbers == number] = _advantages_of_group(group, method, label)
    if not advantages.float().isfinite().all():
        raise ValueError(f"rewards up to {values.abs().max().item():g} overflow the advantages: scale the rewards down")
    return advantages.float()


def _advantages_of_group(group: Tensor, method: str, label: object) -> Tensor:
    centred = group - group.mean()
    if method == "grpo":
        scaled = centred / centred.abs().max()  # the squares of tiny differences would underflow to a std of 0
        return scaled / scaled.square().mean().sqrt()
    if method == "rloo":
        return centred * len(group) / (len(group) - 1)
    if method == "maxrl":
        if group.mean() <= 0:
            raise ValueError(f"advantage maxrl divides by the mean reward, which is {group.mean().item():g} in group "
                             f"{label!r}: give rewards >= 0, or choose grpo")
        return centred / group.mean()
    return centred


def token_weights(trained_tokens: Tensor | Sequence[int], rollouts: Tensor | Sequence[object],
                  method: str = "rollout_mean", horizon: float = 1.0) -> Tensor:
    """The weight [S] (float32) of each trained token of a row, from trained tokens [S] and rollout ids [S] of all rows.

    To be called once with all rows of an optimizer step. R counts rollouts with at least one trained token in it:
    `rollout_mean` 1 / (R * tokens of the rollout over all its rows): all rollouts weigh the same in however many rows;
    `token_mean` 1 / tokens of the step: every token weighs the same;
    `constant` 1 / (R * horizon): the sum over a rollout's tokens, divided by a fixed length (Dr. GRPO).
    A row without trained tokens weighs 0. Worked: rows of 3, 2, 1 of rollout A and 6 of B: each token weighs 1/12.
    """
    _one_of("loss normalization", method, WEIGHTS)
    tokens = torch.as_tensor(trained_tokens, dtype=torch.float64)
    rollout, labels = _numbered(rollouts, tokens, "trained_tokens and rollout ids must be [S]")
    if not (tokens >= 0).all() or not horizon > 0:
        raise ValueError(f"trained_tokens must be >= 0 and horizon > 0, got {tokens.tolist()} and {horizon}")
    tokens_of_rollout = tokens.new_zeros(len(labels)).index_add(0, rollout, tokens)
    active = (tokens_of_rollout > 0).double().sum()
    if method == "rollout_mean":
        divisor = active * tokens_of_rollout[rollout]
    else:
        divisor = (tokens.sum() if method == "token_mean" else active * horizon).expand(len(tokens))
    weights = torch.zeros_like(tokens)
    weights[tokens > 0] = 1 / divisor[tokens > 0]
    return weights.float()


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, weights: Tensor, *,
    rows: Tensor | None = None, ref_logprobs: Tensor | None = None, ratio: str = "token",
    clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 3.0,
    importance: str = "token", importance_cap: float = 2.0, kl_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weighted sum of the clipped policy loss over N trained tokens, and metrics. All tensors are [N].

    `logprobs` current (the only one with a gradient); `old_logprobs` the trainer's own before the update;
    `rollout_logprobs` the sampler's; `ref_logprobs` a reference model's; all at the sampling temperature. `rows`: which
    row a token is of (integers; for the ratios of a sequence; a row must not be split over calls).

    ratio = exp(logprobs - old): of the `token`, or `gspo`, the row's length-normalised one (GSPO). Per token
    -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A) (PPO), for A < 0 at most -dual_clip A (dual clip; None:
    off). Off-policy correction, detached and applied after clipping, of exp(old - rollout): `token` truncated at
    `importance_cap` (TIS), `sequence` the same with the row's length-normalised one, `mask` the token's own one, but 0
    outside [1 / cap, cap] (IcePop), `none`. Plus kl_coef times the k3 estimate of KL(current || reference).

    Metrics are detached sums (`*_sum`, `tokens`) and maxima (`*_max`): see `summarize`.
    """
    _one_of("ratio", ratio, RATIOS)
    _one_of("importance", importance, IMPORTANCES)
    _check_policy_inputs([logprobs, old_logprobs, rollout_logprobs, advantages, weights, rows, ref_logprobs],
                         rows is None and (ratio == "gspo" or importance == "sequence"), kl_coef, importance_cap)
    logprobs = logprobs.to(torch.promote_types(logprobs.dtype, torch.float32))
    old, sampled, advantages, weights = (
        tensor.detach().to(logprobs) for tensor in (old_logprobs, rollout_logprobs, advantages, weights))

    log_ratio = _row_mean(logprobs - old, rows) if ratio == "gspo" else logprobs - old
    ratios = _exp(log_ratio)
    unclipped = ratios * advantages
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = pessimistic = torch.minimum(unclipped, clipped)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.maximum(pessimistic, dual_clip * advantages), pessimistic)

    log_gap = old - sampled
    importances = _exp(_row_mean(log_gap, rows) if importance == "sequence" else log_gap)
    outside = importances > importance_cap
    if importance == "mask":
        outside |= importances < 1 / importance_cap
        correction = torch.where(outside, 0.0, importances)
    else:
        correction = torch.ones_like(importances) if importance == "none" else importances.clamp(max=importance_cap)
    per_token = torch.where(correction == 0, 0.0, -correction * objective)
    metrics = {
        "ratio": ratios, "ratio_clipped": unclipped > clipped, "dual_clipped": objective > pessimistic,
        "approx_kl": _k3(logprobs - old), "mismatch_kl": _k3(log_gap), "logprob_gap": log_gap.abs(),
        "importance": correction, "importance_square": correction.square(), "importance_outside": outside,
    }
    if ref_logprobs is not None:
        kl = _k3(ref_logprobs.detach().to(logprobs) - logprobs)
        per_token = per_token + kl_coef * kl
        metrics["reference_kl"] = kl
    loss = (weights * per_token).sum()
    sums = {f"{name}_sum": value.detach().to(logprobs.dtype).sum() for name, value in metrics.items()}
    maxima = {f"{name}_max": metrics[name].detach().max() if len(logprobs) else logprobs.new_zeros(())
              for name in ("ratio", "importance", "logprob_gap")}
    return loss, {"tokens": logprobs.new_tensor(len(logprobs)), **sums, **maxima}


def summarize(parts: Iterable[dict[str, Tensor]]) -> dict[str, float]:
    """Metrics of all micro-batches -> means over tokens (`*_mean`), maxima, and `ess`, the effective sample size as a
    part of the tokens. Over ranks: gather the parts, or reduce `*_max` by maximum and the rest by sum, before this."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            value = torch.as_tensor(value, dtype=torch.float64)
            combine = torch.maximum if name.endswith("_max") else torch.add
            total[name] = combine(total[name], value) if name in total else value
    values = {name: value.item() for name, value in total.items()}  # one synchronization a metric, not a micro-batch
    tokens, squares = values.get("tokens", 0.0), values.pop("importance_square_sum", 0.0)
    ess = values.get("importance_sum", 0.0) ** 2 / (tokens * squares) if squares else 0.0
    means = {name.removesuffix("_sum") + "_mean": values.pop(name) / max(tokens, 1)
             for name in list(values) if name.endswith("_sum")}
    return {**values, **means, "ess": ess}


def _check_policy_inputs(tensors: list[Tensor | None], rows_missing: bool, kl_coef: float, cap: float) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors if tensor is not None]
    if len(shapes[0]) != 1 or len(set(shapes)) > 1:
        raise ValueError(f"policy_loss takes tensors of one shape [N], got {shapes}")
    if rows_missing:
        raise ValueError("ratio gspo and importance sequence are per row: pass rows")
    if kl_coef and tensors[-1] is None:
        raise ValueError(f"kl_coef {kl_coef} needs ref_logprobs: pass them or set it to 0")
    if not cap >= 1:
        raise ValueError(f"importance_cap must be at least 1, got {cap}")


def _numbered(labels: Tensor | Sequence[object], values: Tensor, wanted: str) -> tuple[Tensor, list[object]]:
    """The number of each label among the different ones, which are the second; one label for each of `values`."""
    labels = labels.tolist() if isinstance(labels, Tensor) else list(labels)
    if values.dim() != 1 or len(labels) != len(values):
        raise ValueError(f"{wanted}, got the shape {tuple(values.shape)} and {len(labels)} ids")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return torch.tensor([numbers[label] for label in labels], dtype=torch.long, device=values.device), list(numbers)


def _row_mean(values: Tensor, rows: Tensor | None) -> Tensor:
    """[N] -> [N]: each value replaced by the mean over its row."""
    assert rows is not None
    unique, index = torch.unique(rows, return_inverse=True)
    sums = values.new_zeros(len(unique)).index_add(0, index, values)
    return (sums / torch.bincount(index, minlength=len(unique)))[index]


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).exp()


def _k3(log_ratio: Tensor) -> Tensor:
    """Schulman's k3, exp(x) - 1 - x >= 0, unbiased for KL(p || q) over samples of p with x = log q - log p."""
    log_ratio = log_ratio.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
    return log_ratio.expm1() - log_ratio


def _one_of(setting: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"unknown {setting} {value!r}: choose one of {', '.join(allowed)}")

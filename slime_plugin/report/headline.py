"""A run in a few sentences and a few numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slime_plugin.report.comparison_table import AT_FLOOR
from slime_plugin.report.formatting import (
    format_brief,
    format_duration,
    format_factor,
    format_number,
    format_share,
    join_words,
)
from slime_plugin.report.run_data import Run, ends, number


def sentences(run: Run) -> list[str]:
    """What happened; nothing about what was not measured."""
    return [sentence for part in (_reward, _logdiff, _trained, _cost, _distillation) for sentence in part(run)]


def sentences_of_all(runs: Sequence[Run]) -> list[str]:
    """What happened in many runs."""
    found = []
    rewards = {run.name: reward for run in runs if (reward := run.reward)}
    if rewards:
        rises = sum(end > start for start, end in rewards.values())
        most = max(rewards, key=lambda name: rewards[name][1])
        start, end = rewards[most]
        found.append(
            f"Reward rises in {rises} of {len(rewards)} runs; the highest final reward is that of {most}, "
            f"from {start:.2f} to {end:.2f}."
        )
    means: dict[str, list[float]] = {}
    for run in runs:
        if run.logdiff is not None:
            means.setdefault(run.method, []).append(run.logdiff)
    ranges = [f"{method} {_range(values)}" for method, values in sorted(means.items(), key=lambda item: max(item[1]))]
    if ranges:
        found.append(f"Logdiff of the trained method, in nats per token: {join_words(ranges)}.")
    return found


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """Name, value and remark of the key numbers."""
    found = []
    if run.reward:
        start, end = run.reward
        found.append(("reward", f"{start:.2f} → {end:.2f}", "first and last tenth of the iterations"))
    if run.logdiff is not None:
        most = format_brief(run.largest_logdiff)
        found.append(("logdiff", format_brief(run.logdiff), f"nats per token, {run.method}; at most {most}"))
    trained, sampled = (sum(line.get(key) or 0 for line in run.iterations) for key in ("trained", "sampled"))
    if sampled:
        found.append(("trained", format_share(trained / sampled), f"of {format_number(sampled)} sampled tokens"))
    if run.cost is not None:
        found.append(("cost", format_factor(run.cost), f"training on a batch, against {run.denominator}"))
    seconds = [value for _, value in run.over_iterations("seconds", "total") if value is not None]
    if seconds:
        found.append(("time", format_duration(sum(seconds)), f"for {len(run.iterations)} iterations"))
    return found


def _reward(run: Run) -> Iterator[str]:
    if run.reward is None:
        return
    start, end = run.reward
    moved = "stays at" if f"{start:.2f}" == f"{end:.2f}" else "rises from" if end > start else "falls from"
    where = f"{start:.2f}" if moved == "stays at" else f"{start:.2f} to {end:.2f}"
    yield f"Reward {moved} {where} in {len(run.iterations)} iterations."


def _logdiff(run: Run) -> Iterator[str]:
    means = {name: run.compared(name, "logdiff", "mean") for name in run.compared_methods}
    known = sorted((value, name) for name, value in means.items() if value is not None)
    if known:
        floor = number(run.comparison or {}, "floor", "mean") or known[0][0]
        near = [(value, name) for value, name in known if value <= AT_FLOOR * floor]
        away = [(value, name) for value, name in known if value > AT_FLOOR * floor]
        parts = []
        if near:  # in ascending order
            at_most = "at most " if len(near) > 1 else ""
            parts.append(f"{at_most}{format_brief(near[-1][0])} with {join_words([name for _, name in near])}")
        if away:
            parts.append(join_words([f"{format_brief(value)} with {name}" for value, name in reversed(away)]))
        yield f"Mean |logdiff| in nats per token: {'; '.join(parts)}."
        return
    if run.logdiff is not None:
        mean, largest = format_brief(run.logdiff), format_brief(run.largest_logdiff)
        yield f"Mean |logdiff| of {run.method}: {mean} nats per token, maximum {largest}."


def _trained(run: Run) -> Iterator[str]:
    parts = []
    for name in run.compared_methods:
        of_sampled, off = run.compared(name, "share_trained"), run.compared(name, "off_context")
        trained = run.compared(name, "trained")
        if of_sampled is not None and (of_sampled < 1 or off):
            other = (
                f", {format_share(off / trained)} of them in a context they were not sampled in"
                if off and trained
                else ""
            )
            parts.append(f"{name} trains {format_share(of_sampled)} of the sampled tokens{other}")
    whole = [name for name in run.compared_methods if run.compared(name, "share_trained") == 1]
    exact = [name for name in whole if not run.compared(name, "off_context")]
    if exact:
        verb = "train" if len(exact) > 1 else "trains"
        parts.append(f"{join_words(exact)} {verb} all sampled tokens, in their own context")
    if parts:
        yield "; ".join(parts) + "."


def _cost(run: Run) -> Iterator[str]:
    costs = {name: run.compared(name, "cost") for name in run.compared_methods if name != run.denominator}
    known = [f"{name} {cost:.2f}x" for name, cost in costs.items() if cost is not None]
    if known:
        yield f"Cost of training on a batch relative to {run.denominator}: {join_words(known)}."


def _distillation(run: Run) -> Iterator[str]:
    divergence = ends([point for point in run.over_steps("leaf_kl") if point[1] is not None])
    if divergence:
        first, last = map(format_brief, divergence)
        yield f"The KL at diverging leaves goes from {first} to {last} nats."
    off = run.switched_off
    if off is not None:
        yield f"The KL was switched off at step {off[0]}: {off[1]}."


def _range(values: Sequence[float]) -> str:
    low, high = format_brief(min(values)), format_brief(max(values))
    return low if low == high else f"{low} to {high}"

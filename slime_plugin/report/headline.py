"""A run in a few sentences and a few numbers: what a reader should know before looking at any plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slime_plugin.report.comparison import AT_FLOOR
from slime_plugin.report.numbers import shown
from slime_plugin.report.run_data import Run, ends, largest, mean, number


def brief(value: float | None, unit: str = "") -> str:
    """A number as one says it.

    >>> brief(4.1e-07, " nats"), brief(None)
    ('4.1e-7 nats', 'n/a')
    """
    if value is None:
        return "n/a"
    rounded = float(f"{value:.2g}") if 0 < abs(value) < 1 else value
    return shown(rounded).replace("e-0", "e-") + unit


def share(value: float | None) -> str:
    """As a percentage; what is nearly all or nearly nothing does not become all or nothing.

    >>> share(0.123), share(0.9999), share(1.0)
    ('12 %', '99.99 %', '100 %')
    """
    if value is None:
        return "n/a"
    percent = 100 * value
    rough = f"{percent:.0f}"
    return f"{percent:.2f} %" if rough in ("0", "100") and float(rough) != percent else f"{rough} %"


def sentences(run: Run) -> list[str]:
    """What happened, in plain words; nothing about what was not measured."""
    return [sentence for part in (_reward, _drift, _trained, _cost, _gate) for sentence in part(run)]


def together(runs: Sequence[Run]) -> list[str]:
    """What happened in many runs."""
    said = []
    rewards = {run.name: reward for run in runs if (reward := ends(run.over_iterations("reward")))}
    if rewards:
        rises = sum(end > start for start, end in rewards.values())
        most = max(rewards, key=lambda name: rewards[name][1])
        start, end = rewards[most]
        said.append(
            f"Reward rises in {rises} of {len(rewards)} runs; the highest in the end is {most}, "
            f"from {start:.2f} to {end:.2f}."
        )
    drifts: dict[str, list[float]] = {}
    for run in runs:
        drift = mean(run.over_iterations("logdiff", "mean"))
        if drift is not None:
            drifts.setdefault(run.method, []).append(drift)
    found = [f"{method} {_range(values)}" for method, values in sorted(drifts.items(), key=lambda item: max(item[1]))]
    if found:
        said.append(f"Drift of the trained method, in nats per token: {listed(found)}.")
    return said


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """Name, number and remark of what is worth a glance."""
    found = []
    reward = ends(run.over_iterations("reward"))
    if reward:
        found.append(("reward", f"{reward[0]:.2f} → {reward[1]:.2f}", "first and last tenth of the iterations"))
    drift = mean(run.over_iterations("logdiff", "mean"))
    if drift is not None:
        most = brief(largest(run.over_iterations("logdiff", "max")))
        found.append(("drift", f"{brief(drift)}", f"nats per token, {run.method}; at most {most}"))
    trained, sampled = (sum(line.get(key) or 0 for line in run.iterations) for key in ("trained", "sampled"))
    if sampled:
        found.append(("trained", share(trained / sampled), f"of {shown(sampled)} sampled tokens"))
    cost = run.compared(run.method, "cost")
    if cost is not None:
        of = (run.comparison or {}).get("denominator", "naive_compressed")
        found.append(("cost", f"{cost:.2f} x", f"one update, against {of}"))
    seconds = [value for _, value in run.over_iterations("seconds", "total") if value is not None]
    if seconds:
        found.append(("time", _duration(sum(seconds)), f"for {len(run.iterations)} iterations"))
    return found


def _reward(run: Run) -> Iterator[str]:
    reward = ends(run.over_iterations("reward"))
    if reward is None:
        return
    start, end = reward
    moved = "stays at" if f"{start:.2f}" == f"{end:.2f}" else "rises from" if end > start else "falls from"
    where = f"{start:.2f}" if moved == "stays at" else f"{start:.2f} to {end:.2f}"
    yield f"Reward {moved} {where} in {len(run.iterations)} iterations."


def _drift(run: Run) -> Iterator[str]:
    drifts = {name: run.compared(name, "logdiff", "mean") for name in run.compared_methods}
    known = sorted((value, name) for name, value in drifts.items() if value is not None)
    if known:
        floor = number(run.comparison or {}, "floor", "mean") or known[0][0]
        near = [(value, name) for value, name in known if value <= AT_FLOOR * floor]
        away = [(value, name) for value, name in known if value > AT_FLOOR * floor]
        worst = max((value for value, _ in near), default=floor)
        stay = f"{listed([name for _, name in near])} {'stay' if len(near) > 1 else 'stays'} at {brief(worst)} nats"
        off = listed([f"{name} is off by {brief(value)}" for value, name in reversed(away)])
        yield f"Per token, {stay} from what the rollout engine logged{f'; {off}' if off else ''}."
        return
    own = mean(run.over_iterations("logdiff", "mean"))
    if own is not None:
        most = largest(run.over_iterations("logdiff", "max"))
        yield (
            f"With the weights that sampled, {run.method} is {brief(own)} nats per token from what the rollout engine "
            f"logged, {brief(most)} at most."
        )


def _trained(run: Run) -> Iterator[str]:
    parts = []
    for name in run.compared_methods:
        of_sampled, off = run.compared(name, "share_trained"), run.compared(name, "off_context")
        trained = run.compared(name, "trained")
        if of_sampled is not None and (of_sampled < 1 or off):
            other = f", {share(off / trained)} of them in a context they were not sampled in" if off and trained else ""
            parts.append(f"{name} trains {share(of_sampled)} of the sampled tokens{other}")
    whole = [name for name in run.compared_methods if run.compared(name, "share_trained") == 1]
    exact = [name for name in whole if not run.compared(name, "off_context")]
    if exact:
        parts.append(f"{listed(exact)} {'train' if len(exact) > 1 else 'trains'} all of them, in their own context")
    if parts:
        yield "; ".join(parts) + "."


def _cost(run: Run) -> Iterator[str]:
    of = (run.comparison or {}).get("denominator", "naive_compressed")
    costs = {name: run.compared(name, "cost") for name in run.compared_methods if name != of}
    known = [f"{cost:.2f} with {name}" for name, cost in costs.items() if cost is not None]
    if known:
        yield f"Where an update with {of} takes 1, it takes {listed(known)}."


def _gate(run: Run) -> Iterator[str]:
    if run.method != "sdcc":
        return
    divergence = ends([point for point in run.over_steps("leaf_kl") if point[1] is not None])
    if divergence:
        yield f"The KL at diverging leaves goes from {brief(divergence[0])} to {brief(divergence[1])} nats."
    off = switched_off(run)
    if off is not None:
        yield f"SDCC was switched off at step {off[0]}: {off[1]}."


def switched_off(run: Run) -> tuple[int, str] | None:
    """The first step without SDCC's KL, and why."""
    return next(((line["step"], str(line["sdcc_off"])) for line in run.steps if line.get("sdcc_off")), None)


def listed(words: Sequence[str]) -> str:
    """
    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _range(values: Sequence[float]) -> str:
    low, high = brief(min(values)), brief(max(values))
    return low if low == high else f"{low} to {high}"


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if seconds < 100 else f"{minutes:.0f} min" if minutes < 100 else f"{hours:.1f} h"

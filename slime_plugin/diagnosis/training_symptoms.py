"""Symptoms from the metrics of updates: ratio, reference KL, gradients, logdiff by place, entropy, SDCC."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence

from slime_plugin.diagnosis.run_contents import RunContents
from slime_plugin.diagnosis.slime_lines import Line
from slime_plugin.diagnosis.symptom import CAUSE, CONSEQUENCE, SIGN, Symptom

MAX_LOGDIFF = {False: 1e-3, True: 0.1}
"""Mean |logdiff| per token, in nats, of an exact method. By whether the trainer computes in bfloat16: rounding alone
makes it up to 1e-5 in float32 and 0.02 in bfloat16."""
MAX_RATIO_OFFSET = {False: 1e-3, True: 0.02}
"""Distance from 1 of the mean ratio in the first update of an iteration."""
MAX_FIRST_KL = {False: 1e-4, True: 1e-2}
"""Reference KL in the first update of a run, in nats."""
MIN_PLACE_TOKENS = 16
"""Fewer tokens of a place say nothing about it."""
MIN_COLLAPSE_ITERATIONS = 8
COLLAPSED_ENTROPY = 0.2
"""Of the entropy at the beginning."""
MIN_REWARD_FALL = 0.05


def not_finite(run: RunContents) -> Iterator[Symptom]:
    """A metric that is null was NaN or infinite: loss and norm of an update are never undefined."""
    for line in run.steps:
        bad = [key for key in ("loss", "grad_norm") if key in line and _number(line, key) is None]
        if bad:
            since = sum(1 for other in run.steps if other["step"] >= line["step"] and _number(other, bad[0]) is None)
            yield Symptom(
                "not a number",
                "error",
                f"{' and '.join(bad)} not finite in step {line['step']}, {bad[0]} in {since} steps from there on",
                "the loss or a gradient overflowed: a learning rate that is too high, or log-probabilities of the "
                "engine and the trainer that are far apart",
                "lower trainer.lr, look at logdiff and ratio in the steps before, and resume from an older checkpoint",
                f"{_metrics(run)}, step {line['step']}",
                CAUSE,
            )
            return


def no_gradient(run: RunContents) -> Iterator[Symptom]:
    norms = [_number(line, "grad_norm") for line in run.steps if "grad_norm" in line]
    if len(norms) >= 2 and all(norm == 0 for norm in norms):
        yield Symptom(
            "no gradient",
            "error",
            f"grad_norm is 0 in all {len(norms)} steps",
            "nothing is learnt: all advantages are 0 (equal rewards within every group), or no token is trained",
            "look at reward_std and at lost in the metrics of iterations; see the other symptoms",
            _metrics(run),
            CONSEQUENCE,
        )


def first_ratio(run: RunContents) -> Iterator[Symptom]:
    """Before the first update of an iteration the policy is the one that the ratio is taken to."""
    limit = MAX_RATIO_OFFSET[run.computes_in_bfloat16]
    first: dict[int, Line] = {}
    for line in run.steps:
        first.setdefault(line["iteration"], line)
    off = [(abs(ratio - 1), line) for line in first.values() if (ratio := _number(line, "ratio")) is not None]
    bad = [(offset, line) for offset, line in off if offset > limit]
    if bad:
        _, worst = max(bad, key=lambda item: item[0])
        yield Symptom(
            "ratio",
            "warning",
            f"ratio is {worst['ratio']:.4g} in step {worst['step']}, the first of iteration {worst['iteration']}; it "
            f"is off by more than {limit:g} in {len(bad)} of {len(first)} iterations",
            "the trainer computes other log-probabilities in the update than before it, with the same weights: "
            "dropout, a kernel that is not deterministic, or an update in between",
            "compare the flags with those of memorywalker slime-args; set trainer.dtype=float32 to see whether it is "
            "rounding",
            f"{_metrics(run)}, step {worst['step']}",
            SIGN,
        )


def first_reference_kl(run: RunContents) -> Iterator[Symptom]:
    first = next((line for line in run.steps if line["step"] == 0), None)
    kl = None if first is None else _number(first, "reference_kl")
    limit = MAX_FIRST_KL[run.computes_in_bfloat16]
    if kl is not None and kl > limit:
        yield Symptom(
            "reference KL",
            "warning",
            f"reference_kl is {kl:.4g} nats in step 0; at most {limit:g} is rounding",
            "the reference is not the model that the run began with: another checkpoint, or a conversion that went "
            "wrong",
            "let model and cluster.megatron name the same weights (launch/prepare.sh converts them), and start anew",
            f"{_metrics(run)}, step 0",
            SIGN,
        )


def logdiff(run: RunContents) -> Iterator[Symptom]:
    """Of an exact method: it says whether trainer and engine agree. Of others it is high by nature."""
    if not run.is_exact or run.is_replay:
        return
    means = [mean for line in run.iterations if (mean := _inner(line, "logdiff", "mean")) is not None]
    limit = MAX_LOGDIFF[run.computes_in_bfloat16]
    places = _places(run.iterations)
    bad = {place: mean for place, mean in places.items() if mean > limit}
    overall = max(means, default=0.0)
    if overall <= limit and not bad:
        return
    kinds = sorted({place.partition("/")[0] for place in bad} - {"start"})
    shown = ", ".join(f"{place} {mean:.3g}" for place, mean in sorted(places.items(), key=lambda item: -item[1]))
    method = run.setting("method", "type")
    if kinds and "start" not in bad and "start" in places:
        cause = (
            f"tokens sampled after {' and '.join(kinds)} are trained under another context than they were sampled "
            "under: the editor, or the recovery of an agent's context, does not record what the engine was sent"
        )
        remedy = (
            f"memorywalker record check RUN, then memorywalker record show of a rollout with {kinds[0]}; an editor of "
            "your own has to edit through Context only"
        )
    else:
        cause = (
            "the engine and the trainer compute different log-probabilities also before any edit: other weights in the "
            "engine, another temperature, data type or attention backend"
        )
        remedy = (
            "memorywalker score RUN --model MODEL of iteration 0 tells weights from numerics; see whether the engine "
            "logs every weight update, and that both compute in the same data type"
        )
    yield Symptom(
        "logdiff",
        "warning",
        f"{method} is exact, and its mean |logdiff| is {overall:.3g} nats where at most {limit:g} is rounding; by "
        f"place: {shown or 'unknown'}",
        cause,
        remedy,
        _metrics(run),
        CAUSE,
    )


def entropy_collapse(run: RunContents) -> Iterator[Symptom]:
    rewards = _over_iterations(run.iterations, "reward")
    entropies = _over_iterations(run.steps, "entropy")
    if min(len(rewards), len(entropies)) < MIN_COLLAPSE_ITERATIONS:
        return
    fifth = max(1, len(rewards) // 5)
    begin, end = _mean(rewards[:fifth]), _mean(rewards[-fifth:])
    fifth = max(1, len(entropies) // 5)
    sure, unsure = _mean(entropies[-fifth:]), _mean(entropies[:fifth])
    if sure < COLLAPSED_ENTROPY * unsure and begin - end > MIN_REWARD_FALL:
        yield Symptom(
            "collapse",
            "warning",
            f"reward falls from {begin:.3g} to {end:.3g} over {len(rewards)} iterations while entropy falls from "
            f"{unsure:.3g} to {sure:.3g} nats",
            "the policy has collapsed: it repeats what it was rewarded for early",
            "resume from a checkpoint before the fall, or start anew, with a lower trainer.lr, a higher objective.kl, "
            "or objective.entropy",
            _metrics(run),
            CAUSE,
        )


def sdcc_off(run: RunContents) -> Iterator[Symptom]:
    step, reason = next(((line["step"], line["sdcc_off"]) for line in run.steps if line.get("sdcc_off")), (None, None))
    place = _metrics(run)
    if reason is None:
        path = run.folder.path / "sdcc.jsonl"
        for state in _states(path.read_text("utf-8", "replace").splitlines() if path.is_file() else ()):
            if state.get("why_off"):
                step, reason, place = state.get("iteration"), state["why_off"], path.name
                break
    if reason is not None:
        unit = "iteration" if place == "sdcc.jsonl" else "step"
        yield Symptom(
            "SDCC off",
            "warning",
            f"the guard rails have switched the KL off in {unit} {step}: {reason}",
            "the teacher's distributions are too far from the student's, so that the rest is trained as "
            "naive_compressed",
            "start anew with a lower method.weight or a longer method.warmup; method.kl_limit, entropy_gap_limit and "
            "patience say when it is switched off",
            place,
            SIGN,
        )


def _states(lines: Sequence[str]) -> Iterator[dict[str, object]]:
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _places(lines: Sequence[Line]) -> dict[str, float]:
    """Mean |logdiff| by place over all iterations, of places with enough tokens."""
    tokens: dict[str, float] = {}
    sums: dict[str, float] = {}
    for line in lines:
        places = line.get("places")
        for place, found in places.items() if isinstance(places, dict) else ():
            number, mean = (_number(found, key) if isinstance(found, dict) else None for key in ("tokens", "logdiff"))
            if number and mean is not None:
                tokens[place] = tokens.get(place, 0.0) + number
                sums[place] = sums.get(place, 0.0) + number * mean
    # Under slime the number is a mean per rollout, so that it may be less than 1.
    enough = MIN_PLACE_TOKENS if max(tokens.values(), default=0.0) >= MIN_PLACE_TOKENS else 0
    return {place: sums[place] / number for place, number in tokens.items() if number >= enough}


def _over_iterations(lines: Sequence[Line], key: str) -> list[float]:
    """The mean of a number by iteration."""
    found: dict[int, list[float]] = {}
    for line in lines:
        value = _number(line, key)
        if value is not None:
            found.setdefault(line["iteration"], []).append(value)
    return [_mean(found[iteration]) for iteration in sorted(found)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _number(line: Line, key: str) -> float | None:
    value = line.get(key)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else None


def _inner(line: Line, key: str, inner: str) -> float | None:
    part = line.get(key)
    return _number(part, inner) if isinstance(part, dict) else None


def _metrics(run: RunContents) -> str:
    return "metrics.jsonl" if run.kind == "run" else "logs/driver.log"

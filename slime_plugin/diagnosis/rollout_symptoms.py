"""Symptoms from the records of rollouts: how they ended, rewards, edits, tool calls, weight versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from slime_plugin.diagnosis.log_patterns import pattern_of
from slime_plugin.diagnosis.run_contents import RunContents
from slime_plugin.diagnosis.stores import StoreStatistics
from slime_plugin.diagnosis.symptom import CAUSE, CONSEQUENCE, SIGN, Severity, Symptom
from slime_plugin.rollout.tools.tool import TOOL_FAILURES
from slime_plugin.slime.tool_failures import MIN_FAILURES, ToolCalls

MIN_ROLLOUTS, MIN_GROUPS = 16, 4
"""Fewer rollouts may be alike by chance."""
MANY_TRUNCATED, MANY_EXCLUDED, MANY_TOOL_FAILURES, MANY_CALL_ERRORS = 0.8, 0.1, 0.1, 0.5
"""Shares from which on they are a symptom."""
MANY_CERTAIN = 0.9
"""Share of sampled tokens with a log-probability of exactly 0."""
NOT_BY_POLICY = TOOL_FAILURES | {"out of time"}
_LIMITS = {
    "turns": ("turns", "raise rollout.turns"),
    "turn tokens": ("turn_tokens", "raise rollout.turn_tokens"),
    "sampled tokens": ("sampled_tokens", "raise rollout.sampled_tokens"),
    "context": ("context_tokens", "raise rollout.context_tokens, or let the harness edit earlier"),
    "time": ("seconds", "raise rollout.seconds, or lower rollout.concurrency if the engine is slow"),
}
"""By what ended a rollout: the setting, and what to do about it."""


def equal_rewards(run: RunContents) -> Iterator[Symptom]:
    groups = [group for store in run.trained for group in store.rewards.values() if len(group) > 1]
    rewards = [reward for group in groups for reward in group]
    if not groups or any(len(set(group)) > 1 for group in groups):
        return
    few = len(groups) < MIN_GROUPS or len(rewards) < MIN_ROLLOUTS
    lowest, highest = min(rewards), max(rewards)
    if lowest == highest:
        cause = (
            f"every rollout gets {highest:g}: the policy never answers correctly, or the reward does not find the "
            "answer in what it writes"
            if highest <= 0
            else f"every rollout gets {highest:g}: the task is too easy, or the reward does not look at the answer"
        )
    else:
        cause = "the rollouts of a question end alike: the engine samples without randomness, or with the same seed"
    yield Symptom(
        "equal rewards",
        "info" if few else "error",
        f"all {len(groups)} groups ({len(rewards)} rollouts) have equal rewards within them, from {lowest:g} to "
        f"{highest:g}",
        f"all advantages are 0, so that nothing is learnt; {cause}",
        "read some rollouts (memorywalker record show); check reward, rollout.temperature, the questions and whether "
        "the model is able to answer some of them; more rollout.samples help with hard ones",
        _names(run.trained),
        CAUSE,
    )


def no_edits(run: RunContents) -> Iterator[Symptom]:
    rollouts = sum(store.rollouts - store.excluded for store in run.trained)
    harness = run.setting("harness", "type")
    if not rollouts or harness in (None, "search_r1") or any(store.edits for store in run.trained):
        return
    longest = max(store.longest_view for store in run.trained)
    threshold = next(
        ((key, value) for key in ("threshold", "compact_at", "fold_at") if (value := run.setting("harness", key))), None
    )
    if threshold is not None:
        key, tokens = threshold
        cause = f"harness.{key} is {tokens} tokens, and the longest context has {longest}"
        remedy = f"lower harness.{key} below what a rollout reaches, or give it more turns and longer results"
    else:
        cause = f"the longest context has {longest} tokens; the policy never calls what edits it, or nothing makes it"
        remedy = (
            "see whether the policy is told about the harness's tools (rollout.describe_tools) and uses them; for an "
            "agent set harness.compact_at"
        )
    yield Symptom(
        "no edits",
        "warning" if rollouts >= MIN_ROLLOUTS else "info",
        f"not one edit in {rollouts} rollouts of {harness}",
        f"nothing is compressed, and all methods train the same: {cause}",
        remedy,
        _names(run.trained),
        SIGN,
    )


def truncated(run: RunContents) -> Iterator[Symptom]:
    """Of the last iterations: at the beginning a policy may not know when to stop."""
    stores = [store for store in run.trained if store.rollouts - store.excluded]
    last = stores[-2:]
    number = sum(store.statuses["truncated"] for store in last)
    every = sum(store.rollouts - store.excluded for store in last)
    if not every or number / every < MANY_TRUNCATED:
        return
    stops: Counter[str] = Counter()
    for store in last:
        stops.update({stop: n for (status, stop), n in store.stops.items() if status == "truncated"})
    limit, most = stops.most_common(1)[0]
    key, remedy = _LIMITS.get(limit, ("", "raise that limit"))
    shown = f"rollout.{key} is {run.setting('rollout', key)}" if key else "its own limit"
    yield Symptom(
        "truncated",
        "warning" if every >= MIN_ROLLOUTS else "info",
        f"{number} of {every} rollouts are truncated, {most} of them by {limit}: {shown}",
        "the limit ends rollouts before the policy answers, so that the reward says nothing about them; or the policy "
        "does not stop by itself: another chat template, or a base model",
        f"{remedy}; read some rollouts to see what they spend it on",
        _names(last),
        CAUSE,
    )


def excluded(run: RunContents) -> Iterator[Symptom]:
    stores = [store for store in run.stores if store.rollouts]
    number, every = sum(store.excluded for store in stores), sum(store.rollouts for store in stores)
    if not number or number / every < MANY_EXCLUDED:
        return
    errors: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for store in stores:
        errors.update(store.errors)
        examples = store.example | examples
    error, times = errors.most_common(1)[0]
    text = examples[error]
    pattern = pattern_of("records", text)
    severity: Severity = "error" if number / every >= MANY_CALL_ERRORS else "warning"
    only_stopped = set(errors) == {"stopped"}
    yield Symptom(
        "failed rollouts",
        "info" if only_stopped else severity,
        f"{number} of {every} rollouts were aborted or failed, {times} of them with: {run.shown(text)}",
        "they were stopped with the run" if only_stopped else _cause(pattern, "rollouts of a question fail by it"),
        f"{run.resume}" if only_stopped else "read that error; " + ("" if pattern is None else pattern.remedy),
        _names(stores),
        CAUSE if pattern is None else pattern.rank,
    )


def tool_failures(run: RunContents) -> Iterator[Symptom]:
    stores = [store for store in run.stores if store.calls]
    errors: Counter[str] = Counter()
    for store in stores:
        errors.update(store.call_errors)
    calls = ToolCalls(sum(store.calls for store in stores), errors)
    failed, share = sum(calls.failures.values()), calls.failed_share or 0.0
    limit = run.setting("rollout", "max_tool_failures")
    if failed >= MIN_FAILURES and share >= MANY_TOOL_FAILURES:
        over = isinstance(limit, int | float) and share > limit
        kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(calls.failures.items(), key=lambda item: -item[1]))
        remedy = (calls.problem(0.0) or "").rpartition("; ")[2]
        yield Symptom(
            "tool failures",
            "error" if over else "warning",
            f"{failed} of {calls.calls} tool calls failed for no fault of the policy ({share:.0%}): {kinds}",
            "a service or its key does not work, and the policy reads error messages instead of results",
            f"{remedy}; the iteration that was stopped for it is sampled again",
            _names(stores),
            CAUSE,
        )
    wrong = {kind: n for kind, n in errors.items() if kind not in NOT_BY_POLICY}
    if calls.calls >= MIN_ROLLOUTS and sum(wrong.values()) / calls.calls >= MANY_CALL_ERRORS:
        yield Symptom(
            "wrong tool calls",
            "info",
            f"{sum(wrong.values())} of {calls.calls} tool calls are the policy's mistakes: {wrong}",
            "the policy does not know the tools, or another format of calls than the chat template's",
            "read some rollouts; training may teach it, and rollout.describe_tools tells it",
            _names(stores),
            CONSEQUENCE,
        )


def no_logprobs(run: RunContents) -> Iterator[Symptom]:
    sampled, certain = (sum(getattr(store, key) for store in run.trained) for key in ("sampled", "certain"))
    if sampled >= MIN_ROLLOUTS and certain / sampled >= MANY_CERTAIN:
        yield Symptom(
            "log-probabilities of 0",
            "error",
            f"{certain} of {sampled} sampled tokens have a logged log-probability of exactly 0",
            "the engine reports none, or samples greedily (temperature 0), so that every token is certain",
            "set rollout.temperature=1, and ask the engine through this package or a server that returns "
            "log-probabilities of what it samples",
            _names(run.trained),
            CAUSE,
        )


def weight_versions(run: RunContents) -> Iterator[Symptom]:
    """A local run samples iteration i by version i; slime counts its updates itself, but an iteration has one."""
    if run.is_replay or not run.settings:
        return
    mixed = [store for store in run.trained if len(store.versions) > 1 or store.straddling]
    stale = [
        store
        for store in run.trained
        if run.kind == "run" and store.versions and str(store.iteration) not in store.versions
    ]
    same = [store for store in run.trained if len(store.versions) == 1]
    numbers = [store.iteration or 0 for store in same]
    apart = max(numbers, default=0) - min(numbers, default=0) > 1  # slime may update every other iteration
    stuck = apart and len({version for store in same for version in store.versions}) == 1
    if not mixed and not stale and not stuck:
        return
    found = (stale or mixed or same)[-1]
    shown = ", ".join(f"{version}: {n}" for version, n in found.versions.most_common(4))
    yield Symptom(
        "weight versions",
        "warning" if stale or stuck else "info",
        f"{found.name} was sampled by other weights than those it is trained with (rollouts by version: {shown}; "
        f"{found.straddling} rollouts saw an update)",
        "the engine did not get the new weights"
        if stale or stuck
        else "weights were updated while rollouts ran, as in asynchronous training",
        "look for errors of the weight update in the engine's log; with engine.url, the server has to read the run's "
        "folder",
        found.name,
        CAUSE,
    )


def damaged_stores(run: RunContents) -> Iterator[Symptom]:
    for store in run.stores:
        if store.damage:
            yield Symptom(
                "damaged records",
                "info" if store.torn and len(store.damage) == 1 else "warning",
                f"{store.name}: {store.damage[0]}",
                "the process that wrote it was killed, or the disk was full"
                if store.torn
                else "the file was changed or the disk is not sound",
                f"nothing is lost but that rollout, which is sampled again; {run.resume}"
                if store.torn
                else "memorywalker record check shows what is left of it",
                store.name,
                CONSEQUENCE,
            )


def _cause(pattern: object, otherwise: str) -> str:
    return str(getattr(pattern, "cause", otherwise))


def _names(stores: list[StoreStatistics] | tuple[StoreStatistics, ...]) -> str:
    return ", ".join(store.name for store in stores)

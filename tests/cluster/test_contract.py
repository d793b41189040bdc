"""How slime calls the hooks, and what of Megatron they are built into: facts, held against hooks and sources."""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_plugin.cluster import driver
from slime_plugin.hooks import rollout, train
from slime_plugin.slime.contract import MEGATRON, SLIME, CallSite, ContainsStrings, Fact, Takes, contract_problems
from slime_plugin.slime.hook_names import ROLLOUT_HOOKS, TRAINING_HOOKS

HOOKS: dict[str, Callable[..., Any]] = {
    "custom_generate_func": rollout.generate,
    "rm_function": rollout.reward,
    "custom_reward_post_process_func": rollout.reward_post_process,
    "custom_convert_samples_to_train_data_func": rollout.convert_samples,
    "custom_log_func": rollout.rollout_log,
    "custom_init": train.init,
    "custom_model_provider": train.model_provider,
    "rollout_data_postprocess": train.rollout_data_postprocess,
    "custom_before_train_step_hook": train.before_train_step,
    "func": train.loss,
}
CALLS = [fact for fact in SLIME if isinstance(fact, CallSite) and fact.callee in HOOKS]


def test_every_hook_is_called_somewhere() -> None:
    assert {fact.callee for fact in CALLS} == HOOKS.keys()
    for path in {**ROLLOUT_HOOKS, **TRAINING_HOOKS}.values():
        module, _, name = path.rpartition(".")
        assert callable(getattr(sys.modules[module], name))


@pytest.mark.parametrize("fact", CALLS, ids=lambda fact: fact.callee)
def test_hooks_take_what_they_are_given(fact: CallSite) -> None:
    given: list[object] = []
    named: dict[str, object] = {}
    for word in fact.arguments.split(", "):
        if word.startswith("**"):
            continue
        name, equals, _ = word.partition("=")
        if equals:
            named[name] = None
        else:
            given.append(None)
    bound = inspect.signature(HOOKS[fact.callee]).bind(*given, **named)
    names = [word.removeprefix("self.") for word in fact.arguments.split(", ") if "=" not in word and "*" not in word]
    assert list(bound.arguments)[: len(names)] == names, "slime's own names, in its order"


def test_generate_is_told_of_evaluations_because_it_asks() -> None:
    assert "evaluation" in inspect.signature(rollout.generate).parameters
    assert "vp_stage" in inspect.signature(train.model_provider).parameters


def source_of(facts: list[Fact]) -> str:
    """The shortest file in which the facts hold."""
    lines: list[str] = []
    methods: dict[str, list[str]] = {}
    for fact in facts:
        if isinstance(fact, CallSite):
            lines.append(f"{fact.callee}({fact.arguments})")
        elif isinstance(fact, ContainsStrings):
            lines.append(repr(fact.texts))
        else:
            outer, _, name = fact.function.rpartition(".")
            definition = f"def {name}({', '.join(fact.parameters)}): pass"
            if outer:
                methods.setdefault(outer, []).append(f"    {definition}")
            else:
                lines.append(definition)
    for outer, definitions in methods.items():
        lines += [f"class {outer}:", *definitions]
    return "\n".join(lines) + "\n"


def write_packages(folder: Path) -> tuple[Path, Path]:
    """A slime and a Megatron in which all facts hold."""
    for name, facts in (("slime", SLIME), ("megatron", MEGATRON)):
        for file in {fact.file for fact in facts}:
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source_of([fact for fact in facts if fact.file == file]))
    return folder / "slime", folder / "megatron"


def test_packages_in_which_the_facts_hold_pass(tmp_path: Path) -> None:
    assert list(contract_problems(*write_packages(tmp_path))) == []


@pytest.mark.parametrize(
    "fact", [*SLIME, *MEGATRON], ids=lambda fact: getattr(fact, "callee", getattr(fact, "function", fact.file))
)
def test_a_package_in_which_one_does_not_hold_is_refused(tmp_path: Path, fact: Fact) -> None:
    slime, megatron = write_packages(tmp_path)
    path = (slime if fact in SLIME else megatron) / fact.file
    text = path.read_text()
    if isinstance(fact, CallSite):
        changed = text.replace(f"{fact.callee}({fact.arguments})", f"{fact.callee}(other)")
        wanted = [fact.callee, fact.arguments, "(other)"]
    elif isinstance(fact, Takes):
        changed = text.replace(", ".join(fact.parameters), "other")
        wanted = [fact.function, fact.parameters[0], "(other)"]
    else:
        changed = text.replace(repr(fact.texts[0]), repr("other"))
        wanted = [fact.texts[0], fact.what]
    assert changed != text
    path.write_text(changed)
    problem, remedy = contract_problems(slime, megatron)
    assert all(word in problem for word in wanted), problem
    assert "this plugin is built for commit" in remedy


def test_files_that_are_gone_and_packages_that_are_not_there(tmp_path: Path) -> None:
    slime, megatron = write_packages(tmp_path)
    (slime / "ray" / "rollout.py").unlink()
    assert any("ray/rollout.py: not there" in problem for problem in contract_problems(slime, megatron))


def test_the_megatron_that_is_installed_here_will_do() -> None:
    assert [problem for problem in contract_problems() if problem.startswith("megatron")] == []


class TestDriver:
    def test_it_refuses_before_it_imports_anything(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            driver.main(["--num-rolout", "3"])
        assert ended.value.code == 1
        assert capsys.readouterr().err.startswith(
            "Error: command line: slime has no flag --num-rolout; use '--num-rollout'"
        )

    def test_without_slime_it_says_where_to_get_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            driver.main(["--num-rollout", "3"])
        assert "Error: slime: not installed; docker/slime.Dockerfile" in capsys.readouterr().err

    def test_ranks_that_sleep_cannot_have_expandable_segments(self) -> None:
        variables = {"SLIME_ENABLE_EXPANDABLE_SEGMENTS": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        sleeping, awake = Namespace(offload_train=True), Namespace(offload_train=False)
        named = [problem.partition(":")[0] for problem in driver.allocator_problems(sleeping, variables)]
        assert sorted(named) == sorted(variables)
        assert list(driver.allocator_problems(awake, variables)) == []
        assert list(driver.allocator_problems(sleeping, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"})) == []

    def test_it_runs_the_train_beside_the_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "slime").mkdir()
        (tmp_path / "slime" / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(Exception, match="set SLIME_DIR"):
            driver.slime_train()
        (tmp_path / "train.py").write_text("def train(args):\n    return f'trained {args}'\n")
        assert driver.slime_train()("this") == "trained this"  # type: ignore[arg-type]  # any will do

"""A test of an editor: a policy that follows a script, and what it saw at each of its turns.

python -m pytest examples/editors
"""

from __future__ import annotations

from tests.rollout.policy import ANSWER, Lookup, Scripted, call, decode, rolled_out

FACTS = Lookup({"a": "first fact", "b": "second fact", "c": "third fact"})
HARNESS = {"type": "examples.editors.keep_last:KeepLast", "keep": 1}


def test_only_the_last_result_stays() -> None:
    policy = Scripted([call("search", query=name) for name in "abc"] + [ANSWER])
    record = rolled_out(policy, HARNESS, [FACTS])  # also checks that the record says what the policy saw
    last = decode(policy.seen[-1][0])
    assert last.count("[cleared]") == 2
    assert [fact in last for fact in FACTS.known.values()] == [False, False, True]
    assert [(edit.kind, edit.author) for edit in record.edits] == [("prune", "harness")] * 2

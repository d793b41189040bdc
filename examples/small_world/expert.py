"""A scripted, fallible expert in place of the engine: it reads the context as text and says what a policy should.

It keeps no state, so what an editor has done to the context is all it knows, as for a policy. It restates the fact it
looked up and then acts: asks for the next one, answers, or edits. Its mistakes are what reinforcement learning later
removes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from examples.small_world.tokenizer import CLOSE, OFFLOAD, POP, RETRIEVE, SEARCH
from examples.small_world.world import ATTRIBUTES, RELATIONS, Fact, query_of
from slime_plugin.rollout.engine.engine import Generation, Request

_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>\n|\Z)", re.DOTALL)
_FACT = re.compile(r"- (\w+ \w+)'s (\w+) is (\w+(?: \w+)?)\.")
_QUESTION = re.compile(r"What is (\w+ \w+)((?:'s \w+)+)\?")
_QUERY = re.compile(r"find (\w+ \w+)'s (\w+)\"")
_STUB = re.compile(r"<tool_response>\n\[(\w)\]\n</tool_response>")
_NAMES = "ABCDEFGH"


@dataclass(frozen=True, slots=True)
class Noise:
    """How often the expert errs, at each chance it has."""

    relation: float = 0.06
    """Asks for another relation."""
    person: float = 0.15
    """Asks about another person it has read of."""
    answer: float = 0.08
    """Answers before it has got there."""
    summary: float = 0.2
    """Keeps a fact that does not matter."""
    edit: float = 0.5
    """Pops or offloads what it has read. No mistake, and no necessity either."""
    unread: float = 0.12
    """Pops or offloads before it has read."""
    retrieve: float = 0.1
    """Fetches what it no longer needs."""


SILENT = Noise(relation=0, person=0, answer=0, summary=0, edit=1, unread=0, retrieve=0)
"""No mistakes, and an edit at every chance."""


@dataclass
class Seen:
    """What a context says, in the expert's terms."""

    mode: str = ""
    start: str = ""
    path: Sequence[str] = ()
    asked: tuple[str, str] | None = None
    """The last query whose fact has not been restated."""
    stated: list[Fact] = field(default_factory=list)
    read: list[Fact] = field(default_factory=list)
    """Facts in the tool results that are there."""
    stubs: list[str] = field(default_factory=list)
    offloads: int = 0
    last: str = ""
    """The message that the turn follows."""

    @classmethod
    def of(cls, text: str) -> Seen:
        seen = cls()
        *messages, _turn = _MESSAGE.findall(text)
        for role, content in messages:
            if role == "system":
                seen.mode = content
            elif role == "assistant":
                seen._hear(content)
            elif asked := _QUESTION.match(content):
                seen.start, seen.path = asked[1], asked[2].split("'s ")[1:]
            else:
                seen.read += [Fact(*found) for found in _FACT.findall(content)]
                seen.stubs += _STUB.findall(content)
            seen.last = content
        return seen

    def _hear(self, said: str) -> None:
        facts = [Fact(*found) for found in _FACT.findall(said)]
        if facts:
            self.stated += facts
            self.asked = None
        if query := _QUERY.search(said):
            self.asked = (query[1], query[2])
        self.offloads += OFFLOAD in said

    @property
    def unread(self) -> Fact | None:
        """What answers the last query, or what came instead."""
        if self.asked is None or not self.read:
            return None
        right = [fact for fact in self.read if (fact.subject, fact.relation) == self.asked]
        half = [fact for fact in self.read if fact.subject == self.asked[0]]
        return (right or half or self.read)[0] if "<tool_response>" in self.last or right else None

    def progress(self, stated: Sequence[Fact]) -> tuple[str, int]:
        """Whom the next question is about, and how many hops are done."""
        if not stated:
            return self.start, 0
        last = stated[-1]
        done = self.path.index(last.relation) + 1 if last.relation in self.path else min(len(stated), len(self.path))
        return last.value, done


class Expert:
    """An engine. The same turn for the same seed, rollout and context, whatever else is under way."""

    def __init__(self, tokenizer: Tokenizer, noise: Noise = SILENT, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._noise = noise
        self._seed = seed

    async def generate(self, request: Request) -> Generation:
        context = self._tokenizer.decode(list(request.prompt), skip_special_tokens=False)
        draw = random.Random(f"{self._seed} {request.rollout} {context}")
        said = self.say(Seen.of(context), draw)
        tokens = self._tokenizer.encode(said + "<|im_end|>", add_special_tokens=False).ids
        kept = tuple(tokens[: request.max_tokens])
        return Generation(kept, (0.0,) * len(kept), "stop" if len(kept) == len(tokens) else "length")

    def say(self, seen: Seen, draw: random.Random) -> str:
        fact, noise = seen.unread, self._noise
        if seen.last.startswith("Summarize"):
            others = [other for other in (*seen.stated, *seen.read) if other != fact]
            kept = fact or (seen.stated[-1] if seen.stated else None)
            if others and (kept is None or draw.random() < noise.summary):
                kept = draw.choice(others)
            return kept.text if kept else "nothing"
        if fact is None and seen.asked is not None:  # what was asked for is out of sight
            return _call(RETRIEVE + seen.stubs[-1] + CLOSE) if seen.stubs else _search(*seen.asked)
        edit = {"pop": _call(POP), "memex": _call(OFFLOAD + _NAMES[seen.offloads % len(_NAMES)] + CLOSE)}.get(seen.mode)
        if fact is None:
            return self._act(seen, seen.stated, draw)
        if edit and draw.random() < noise.unread:
            return edit
        stated = [*seen.stated, fact]
        if edit and seen.progress(stated)[1] < len(seen.path) and draw.random() < noise.edit:
            return fact.text + edit
        return fact.text + self._act(seen, stated, draw)

    def _act(self, seen: Seen, stated: Sequence[Fact], draw: random.Random) -> str:
        person, done = seen.progress(stated)
        noise = self._noise
        known = done > 0
        if done == len(seen.path) or " " not in person or (known and draw.random() < noise.answer):
            if seen.stubs and known and draw.random() < noise.retrieve:
                return _call(RETRIEVE + seen.stubs[-1] + CLOSE)
            return f"<answer> {person} </answer>"
        relation = seen.path[done]
        others = sorted({name for fact in seen.read for name in (fact.subject, fact.value) if " " in name} - {person})
        if others and draw.random() < noise.person:
            person = draw.choice(others)
        if draw.random() < noise.relation:
            relation = draw.choice([*RELATIONS] if relation in RELATIONS else [*ATTRIBUTES])
        return _search(person, relation)


def _call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def _search(person: str, relation: str) -> str:
    return _call(SEARCH + query_of(person, relation) + CLOSE)

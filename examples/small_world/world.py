"""People, facts about them, and questions that no single fact answers.

    python -m examples.small_world.world --people 40 --questions 200 --hops 2 3 --seed 0 --out DIR [--held-out]

A question of n hops is answered by n look-ups, each of which needs what the one before it found: "What is Ada Birch's
boss's pet?" is ``find Ada Birch's boss``, then ``find`` that boss's ``pet``. To a search engine that counts words, "Ada
Birch's boss is Leo Reed" and "Leo Reed's boss is Ada Birch" are the same. So for each relation people are split: one
half has a boss, the other half is one. Then only the right fact holds all words of a query, and what shares some of
them (the same person, half the name, the same relation) comes along as a distractor.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from slime_plugin.errors import MemoryWalkerError
from slime_plugin.rollout.messages import Question


def words(text: str) -> list[str]:
    return text.split()


FIRST = words(
    "Ada Ben Cora Dan Elsa Finn Gina Hugo Iris Jack Kira Leo Mona Nils Olga Paul Rosa Sam Tina Udo "
    "Vera Walt Xenia Yann Zoe Amir Bea Carl Dora Emil Faye Gus Hanna Ivan Jana Kurt Lena Max Nora Otto"
)
LAST = words(
    "Adler Birch Clark Drake Evans Frost Grant Hayes Irwin Jones Keller Lloyd Marsh Nolan Owens Price Quinn Reed "
    "Stone Turner Usher Vance Walsh Xu Yates Zeller Abbot Boyd Cole Dunn Ellis Ford Gray Hill Ingram Judd King Lane "
    "Moss North"
)
RELATIONS = words("boss mother father doctor neighbor teacher friend cousin")
ATTRIBUTES: Mapping[str, Sequence[str]] = {
    "city": words("Paris Rome Oslo Cairo Lima Delhi Tokyo Berlin Madrid Dublin Quito Seoul"),
    "pet": words("cat dog parrot rabbit hamster turtle pony goat snake ferret lizard duck"),
    "color": words("red blue green yellow black white purple orange brown pink gold silver"),
    "food": words("rice pasta soup bread cheese salad sushi curry pizza beans apples pancakes"),
}


class WorldError(MemoryWalkerError):
    """A world that cannot be made as large or as curious as asked."""


@dataclass(frozen=True, slots=True)
class Fact:
    """``subject``'s ``relation`` is ``value``: a person or a word."""

    subject: str
    relation: str
    value: str

    @property
    def text(self) -> str:
        """With a dash in front, every name follows a space, here as in queries and answers: one word, one token."""
        return f"- {self.subject}'s {self.relation} is {self.value}."


def query_of(subject: str, relation: str) -> str:
    return f"find {subject}'s {relation}"


def names(*, held_out: bool) -> list[str]:
    """Names of the 80 % for training, or of the other 20 %: new combinations, not new words."""
    pairs = product(enumerate(FIRST), enumerate(LAST))
    return [f"{first} {last}" for (i, first), (j, last) in pairs if ((3 * i + j) % 5 == 0) == held_out]


@dataclass(frozen=True)
class World:
    """Facts by subject and relation."""

    facts: Mapping[tuple[str, str], Fact]

    @classmethod
    def generate(cls, people: int, seed: int, *, held_out: bool = False) -> World:
        """The same world for the same numbers, on every machine."""
        pool = names(held_out=held_out)
        if not 4 <= people <= len(pool):
            raise WorldError(f"a world of {people} people; there are names for 4 to {len(pool)}: choose among these")
        draw = random.Random(f"world {people} {seed} {held_out}")
        circle = draw.sample(pool, people)
        facts = []
        for relation in RELATIONS:
            shuffled = draw.sample(circle, people)
            half = people // 2
            facts += [Fact(subject, relation, draw.choice(shuffled[half:])) for subject in shuffled[:half]]
        for attribute, values in ATTRIBUTES.items():
            facts += [Fact(subject, attribute, draw.choice(values)) for subject in circle]
        return cls({(fact.subject, fact.relation): fact for fact in facts})

    def __or__(self, other: World) -> World:
        """Both worlds side by side: nobody knows anybody of the other."""
        return World({**self.facts, **other.facts})

    def chains(self, hops: int) -> Iterator[tuple[Fact, ...]]:
        """Every way to ask ``hops`` times, with neither a person nor a relation met twice."""
        starts = [(fact,) for fact in self.facts.values() if hops == 1 or fact.relation in RELATIONS]
        for chain in starts:
            yield from self._longer(chain, hops)

    def _longer(self, chain: tuple[Fact, ...], hops: int) -> Iterator[tuple[Fact, ...]]:
        if len(chain) == hops:
            yield chain
            return
        last = len(chain) + 1 == hops
        met, asked = {fact.subject for fact in chain}, {fact.relation for fact in chain}
        for relation in ATTRIBUTES if last else RELATIONS:
            fact = self.facts.get((chain[-1].value, relation))
            if fact is not None and relation not in asked and fact.value not in met:
                yield from self._longer((*chain, fact), hops)

    def questions(self, count: int, hops: Sequence[int], seed: int, label: str = "q") -> list[Question]:
        """Different questions, their hops drawn from ``hops``: name a number twice to have it twice as often."""
        draw = random.Random(f"questions {seed}")
        wanted = [draw.choice(hops) for _ in range(count)]
        asked: dict[int, list[tuple[Fact, ...]]] = {}
        for number in sorted(set(wanted)):
            every = list(self.chains(number))
            if len(every) < wanted.count(number):
                raise WorldError(
                    f"{wanted.count(number)} questions of {number} hops; this world has {len(every)}: "
                    "ask for fewer, or for more people"
                )
            asked[number] = draw.sample(every, wanted.count(number))
        return [_question(f"{label}{i}-{number}hops", asked[number].pop()) for i, number in enumerate(wanted)]

    def corpus(self) -> list[str]:
        """The text of every fact."""
        return [fact.text for fact in self.facts.values()]


def _question(name: str, chain: tuple[Fact, ...]) -> Question:
    path = "".join(f"'s {fact.relation}" for fact in chain)
    return Question(name, f"What is {chain[0].subject}{path}?", (chain[-1].value,))


def write_corpus(path: Path, world: World) -> None:
    lines = [json.dumps({"id": f"f{i}", "text": text}) for i, text in enumerate(world.corpus())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_questions(path: Path, questions: Sequence[Question]) -> None:
    lines = [json.dumps({"id": q.id, "question": q.text, "answers": list(q.answers)}) for q in questions]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.small_world.world", description=__doc__.splitlines()[0])
    parser.add_argument("--people", type=int, default=40)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--hops", type=int, nargs="+", default=[2, 3], choices=range(2, 8), metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--held-out",
        action="store_true",
        help="add as many people again, with names used nowhere else and questions of their own in held_out.jsonl",
    )
    given = parser.parse_args(arguments)
    world = World.generate(given.people, given.seed)
    given.out.mkdir(parents=True, exist_ok=True)
    write_questions(given.out / "questions.jsonl", world.questions(given.questions, given.hops, given.seed))
    if given.held_out:
        others = World.generate(given.people, given.seed, held_out=True)
        asked = others.questions(given.questions, given.hops, given.seed, "h")
        write_questions(given.out / "held_out.jsonl", asked)
        world |= others
    write_corpus(given.out / "corpus.jsonl", world)
    print(f"wrote {len(world.facts)} facts and {given.questions} questions to {given.out}")


if __name__ == "__main__":
    main()

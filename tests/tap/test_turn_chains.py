"""Where a turn was continued more than once: one story for each reason that decides what became of the context."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_plugin.recovery.turn_chains import TurnChain, TurnChains
from slime_plugin.tap.payload import Answer, Part, Reply, Text, ToolResult
from tests.tap.engines import spell
from tests.tap.test_session import SYSTEM, TASK, Client, back, looking, play, three_turns

GO_ON, ASIDE = Text("user", "Go on."), Text("user", "A word?")


class Story:
    """Three turns and their results, of which the last two are what happens after a fork."""

    def __init__(self, client: Client, parts: list[Part]) -> None:
        self.client, self.parts = client, parts

    def upto(self, turns: int) -> list[Part]:
        """The conversation with so many turns and their results."""
        return self.parts[: 2 + 2 * turns]

    async def ask(self, parts: list[Part], says: str) -> Answer:
        return await self.client.ask(parts, says)


async def rewords(story: Story) -> None:
    await story.ask([*story.upto(2), Reply("In other words."), GO_ON], spell("Done."))


async def calls(story: Story) -> None:
    await story.ask([*story.upto(2), ASIDE], looking(7))


async def goes_on(story: Story) -> None:
    asked = [*story.upto(2), ASIDE]
    answer = await story.ask(asked, spell("Word."))
    await story.ask([*asked, back(answer), GO_ON], spell("Done."))


async def is_shown_elsewhere(story: Story) -> None:
    answer = await story.ask([*story.upto(2), ASIDE], spell("Word."))
    await story.ask([SYSTEM, TASK, back(answer), GO_ON], spell("Done."))


async def asks_aside(story: Story) -> None:
    await story.ask([*story.upto(2), ASIDE], spell("Word."))


def forked(client: Client) -> tuple[TurnChains, TurnChain]:
    chains = TurnChains(client.session.contexts)
    (chain,) = [chain for chain in chains.chains if chain.forked is not None]
    return chains, chain


REASONS = {
    "shows replies": rewords,
    "has calls": calls,
    "goes on": goes_on,
    "is used elsewhere": is_shown_elsewhere,
    "": asks_aside,
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_fork_is_the_rewritten_context_for_one_reason(reason: str, tmp_path: Path) -> None:
    async def tell(client: Client) -> None:
        await REASONS[reason](Story(client, await three_turns(client)))

    chains, chain = forked(play(tmp_path, tell))
    assert chain.forked is not None
    assert chain.forked.number == 1
    first = chain.turns[0]
    holds = {
        "shows replies": chains.shows_replies_after(first, chain.forked),
        "is used elsewhere": chains.is_used_outside(chain),
        "goes on": len(chain.turns) > 1,
        "has calls": bool(first.content.calls),
    }
    assert {name for name, value in holds.items() if value} == {reason} - {""}
    assert chains.replaces(chain) == bool(reason)


def test_a_turn_without_content_is_left_out_by_clients(tmp_path: Path) -> None:
    async def tell(client: Client) -> None:
        parts = await three_turns(client)
        await client.ask([*parts, GO_ON], spell(thought="Nothing to say."))
        await client.ask([*parts, ASIDE], spell("Word."))

    chains, chain = forked(play(tmp_path, tell))
    assert [turn.number for turn in chain.turns] == [4]
    assert chains.replaces(chain)


def numbers(client: Client) -> list[list[int]]:
    return [[turn.number for turn in chain.turns] for chain in TurnChains(client.session.contexts).chains]


def test_of_two_answers_to_one_request_the_chain_takes_the_one_that_was_used(tmp_path: Path) -> None:
    async def tell(client: Client) -> None:
        parts = await three_turns(client)
        await client.ask(parts, looking(3), digest="first")
        again = await client.ask(parts, looking(4), digest="second")
        await client.ask([*parts, back(again), ToolResult(again.calls[0].id, "4")], spell("Done."))

    client = play(tmp_path, tell)
    assert numbers(client) == [[0, 1, 2, 4, 5], [3]]
    chains, chain = forked(client)
    assert chains.is_retried(chain)
    assert not chains.is_retried(chains.chains[0])


def test_a_question_on_the_side_is_no_part_of_the_chain(tmp_path: Path) -> None:
    async def tell(client: Client) -> None:
        parts = await three_turns(client)
        await client.ask([*parts, ASIDE], spell("Word."))
        await client.ask([*parts, GO_ON], spell("Done."))

    assert numbers(play(tmp_path, tell)) == [[0, 1, 2, 4], [3]]


def test_an_answer_that_comes_back_in_other_words_is_part_of_the_chain(tmp_path: Path) -> None:
    async def tell(client: Client) -> None:
        parts = [*await three_turns(client), GO_ON]
        await client.ask(parts, spell("Word."))
        await client.ask([*parts, Reply("Another word."), GO_ON], spell("Done."))

    assert numbers(play(tmp_path, tell)) == [[0, 1, 2, 3], [4]]


def test_an_answer_that_another_context_shows_is_part_of_the_chain(tmp_path: Path) -> None:
    async def tell(client: Client) -> None:
        parts = await three_turns(client)
        answer = await client.ask([*parts, ASIDE], spell("Word."))
        await client.ask([*parts, GO_ON], spell("More."))
        await client.ask([SYSTEM, TASK, back(answer), GO_ON], spell("Done."))

    assert numbers(play(tmp_path, tell)) == [[0, 1, 2, 3], [4], [5]]

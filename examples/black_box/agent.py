"""An agent that was not written for training: one file, no packages, a provider that speaks OpenAI's interface.

    OPENAI_BASE_URL=.. OPENAI_API_KEY=.. python agent.py CORPUS --fold-at 85 < question.txt

It looks things up in a file of facts and answers. Its tools are words in the text, as in many home-made agents: what
the model writes between ``<tool_call>`` tags is carried out. Once a turn has taken as many tokens as ``--fold-at``
says, it asks for a summary, and goes on with the question and the summary alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

Message = dict[str, str]

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Facts:
    """Lines of text that are found by the words they share with a query, rare ones first (BM25)."""

    def __init__(self, path: Path) -> None:
        self.lines = [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
        self.words = [Counter(re.findall(r"\w+", line.casefold())) for line in self.lines]
        self.found_in = Counter(word for words in self.words for word in words)
        self.usual = sum(words.total() for words in self.words) / len(self.lines)

    def search(self, query: str, count: int = 3) -> str:
        wanted = re.findall(r"\w+", query.casefold())
        scores = [sum(self.score(word, words) for word in wanted) for words in self.words]
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
        return "\n".join(self.lines[i] for i in best if scores[i] > 0) or "nothing found"

    def score(self, word: str, words: Counter[str], k: float = 1.5, b: float = 0.75) -> float:
        n, times = self.found_in[word], words[word]
        rarity = math.log(1 + (len(self.lines) - n + 0.5) / (n + 0.5))
        return rarity * times / (times + k * (1 - b + b * words.total() / self.usual))


def ask(messages: list[Message], max_tokens: int) -> tuple[str, int]:
    """What the model says, and how many tokens that took in all."""
    body = {"model": "policy", "messages": messages, "max_tokens": max_tokens}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
    return answer["choices"][0]["message"]["content"], answer["usage"]["total_tokens"]


def carry_out(call: str, facts: Facts) -> str:
    try:
        return facts.search(json.loads(call)["arguments"]["query"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"Error: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--fold-at", type=int, default=10**9)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--turn-tokens", type=int, default=40)
    options = parser.parse_args()
    facts, beginning = (
        Facts(options.corpus),
        [
            {"role": "system", "content": "fold"},
            {"role": "user", "content": sys.stdin.read()},
        ],
    )
    messages, said, used = list(beginning), "", 0
    for _ in range(options.turns):
        if used >= options.fold_at and len(messages) > len(beginning) + 1:
            summary, used = ask([*messages, {"role": "user", "content": "Summarize."}], 16)
            messages = [*beginning, {"role": "assistant", "content": summary}]
        said, used = ask(messages, options.turn_tokens)
        messages.append({"role": "assistant", "content": said})
        calls = CALL.findall(said)
        if not calls:
            break
        for call in calls:
            found = f"<tool_response>\n{carry_out(call, facts)}\n</tool_response>"
            messages.append({"role": "user", "content": found})
    print(said)


if __name__ == "__main__":
    main()

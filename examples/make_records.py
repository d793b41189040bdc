"""Writes the records in ``examples/records``: how a record is made, on three histories small enough to read.

python examples/make_records.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from slime_plugin.record import Edit, Meta, Record, dump_record


def running_example() -> Record:
    """The paper's running example: s and y1 .. y4 are given; y5, y8 and y11 are evicted after y7, y10 and y12."""
    return Record(
        tokens=list(range(100, 114)),
        generated=[0] * 5 + [1] * 9,
        logprobs=[None] * 5 + [-0.1 * i for i in range(1, 10)],
        views=[
            [(0, 8)],
            [(0, 5), (6, 11)],
            [(0, 5), (6, 8), (9, 13)],
            [(0, 5), (6, 8), (9, 11), (12, 14)],
        ],
        edits=[Edit("pop", "policy")] * 3,
        meta=Meta(id="running-example", harness="tc_rag", group="paper", reward=1.0),
        extra={"pieces": ["s", *(f"y{i}" for i in range(1, 13)), "ans"]},
    )


def weather() -> Record:
    """The paper's weather lookup: the umbrella advice is written while the tool result is in view, the transit answer
    after ``pop`` has taken it out."""
    tape = [
        (0, "umbrella for tomorrow's Shanghai meeting?"),
        (1, 'get_weather("Shanghai", +1d)'),
        (0, "[weather: afternoon rain]"),
        (1, "rain is likely tomorrow afternoon --- bring an umbrella"),
        (1, "pop()"),
        (1, 'get_transit("Line 2")'),
        (0, "[transit: every four minutes]"),
        (1, "Line 2 runs every four minutes"),
    ]
    pieces, generated, stops = [], [], [0]
    for sampled, text in tape:
        words = text.split(" ")
        pieces += words
        generated += [sampled] * len(words)
        stops.append(len(pieces))
    vocabulary = {word: 200 + i for i, word in enumerate(dict.fromkeys(pieces))}
    return Record(
        tokens=[vocabulary[word] for word in pieces],
        generated=generated,
        logprobs=[-0.25 if sampled else None for sampled in generated],
        views=[
            [(0, stops[5])],
            [(0, stops[2]), (stops[3], stops[8])],  # without the weather envelope
        ],
        edits=[Edit("pop", "policy")],
        meta=Meta(id="weather", harness="tc_rag", group="paper", reward=1.0),
        extra={"pieces": pieces},
    )


def offload_and_restore() -> Record:
    """A history that does not only shrink: offload leaves a stub, retrieve brings the span back elsewhere, and the
    terminal restore puts it where it was before the answer is given."""
    pieces = "s q | call a | r1 r2 r3 | think offload | stub | think2 retrieve | back use | answer".replace(
        "| ", ""
    ).split()
    at = {piece: i for i, piece in enumerate(pieces)}
    sampled = {"call", "a", "think", "offload", "think2", "retrieve", "use", "answer"}
    result = (at["r1"], at["r3"] + 1)
    return Record(
        tokens=[300 + i for i in range(len(pieces))],
        generated=[int(piece in sampled) for piece in pieces],
        logprobs=[-0.5 if piece in sampled else None for piece in pieces],
        views=[
            [(0, at["stub"])],
            [(0, at["r1"]), (at["stub"], at["stub"] + 1), (at["think"], at["stub"]), (at["think2"], at["back"])],
            [
                (0, at["r1"]),
                (at["stub"], at["stub"] + 1),
                (at["think"], at["stub"]),
                (at["think2"], at["back"] + 1),
                result,
                (at["use"], at["answer"]),
            ],
            [(0, at["stub"]), (at["think2"], at["back"]), (at["use"], at["answer"] + 1)],
        ],
        edits=[Edit("offload", "policy"), Edit("retrieve", "policy"), Edit("restore", "harness")],
        meta=Meta(id="offload-and-restore", harness="memexrl", group="paper", reward=0.2),
        extra={"pieces": pieces},
    )


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for make in (running_example, weather, offload_and_restore):
        path = folder / f"{make.__name__}.json"
        path.write_text(dump_record(make()) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "records")

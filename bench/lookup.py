"""What the look-up proposers cost, and how much of what they propose comes true on real text, without running a model.

    python bench/lookup.py [MODEL] [--json]

MODEL, a catalogue name or a path, gives the tokenizer. Costs are microseconds of processor time, beside a 4 ms step (a small model
decoding one sequence). For what comes true an output is known beforehand, and is put out as verification would do it: the tokens of the
draft that are right, and one more. Texts are the standard library's sources and Python's manual, and differ a little between Pythons.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from tokenmill.speculate.ngram import NGramProposer
from tokenmill.speculate.proposer import Proposer, Wish, Worth
from tokenmill.speculate.suffix import SuffixProposer
from tokenmill.text.samples import evaluation_texts
from tokenmill.weights.catalogue import resolve
from tokenmill.weights.vocabulary import load_tokenizer

STEP_US = 4000.0
LINES = 150
WORTH = Worth(1, 1.0, lambda rows: 0.9 + 0.1 * rows)
ROOM = 1 << 17
PROPOSERS: dict[str, Callable[[], Proposer]] = {"ngram": lambda: NGramProposer(), "suffix": lambda: SuffixProposer(ROOM)}


class Case(NamedTuple):
    """Requests one after the other, each a prompt and its output. before: how many of them only come before what is counted."""

    name: str
    requests: list[tuple[list[int], list[int]]]
    before: int = 0


class Truth(NamedTuple):
    """What came of drafts of up to `most` tokens. drafts: those that were not empty. promised: the sum of their odds."""

    case: str
    proposer: str
    most: int
    steps: int
    drafts: int
    drafted: int
    accepted: int
    promised: float
    tokens: int


def cases(encode: Callable[[str], list[int]]) -> list[Case]:
    texts = evaluation_texts()
    lines = texts["python"].splitlines()
    files = ["\n".join(lines[at : at + LINES]) + "\n" for at in range(200, 200 + 8 * LINES, LINES)]
    edits, calls = [], []
    for file in files:
        changed = file.splitlines()
        changed[LINES // 2] = changed[LINES // 2].replace(" ", "  ") + "  # changed here"
        edits.append((encode(f"Change one line of this file:\n```\n{file}```\n"), encode("```\n" + "\n".join(changed) + "\n```")))
        calls.append((encode("Write a module like it.\n"), encode("```\n" + file + "```")))
    prose = encode(texts["english"])
    return [
        Case("repeats a file of 150 lines with one change", edits),
        Case("writes new code", calls),
        Case("writes code that it has written before", [*calls, *calls], len(calls)),
        Case("writes prose", [(prose[at : at + 200], prose[at + 200 : at + 1200]) for at in range(0, 12_000, 2_000)]),
    ]


def simulate(case: Case, name: str, most: int) -> Truth:
    proposer = PROPOSERS[name]()
    steps = drafts = drafted = accepted = 0
    promised = 0.0
    for number, (prompt, output) in enumerate(case.requests):
        if number == case.before:
            steps = drafts = drafted = accepted = 0
            promised = 0.0
        text, whole = list(prompt), prompt + output
        while len(text) < len(whole):
            (draft,) = proposer.propose([Wish(number, text, len(prompt), min(most, len(whole) - len(text) - 1))], WORTH)
            right = 0
            while right < len(draft.tokens) and draft.tokens[right] == whole[len(text) + right]:
                right += 1
            promised += sum(accumulate(draft.odds, mul))
            steps, drafts, drafted, accepted = steps + 1, drafts + bool(draft.tokens), drafted + len(draft.tokens), accepted + right
            text += whole[len(text) : len(text) + right + 1]
        proposer.forget(number)
    tokens = sum(len(output) for _, output in case.requests[case.before :])
    return Truth(case.name, name, most, steps, drafts, drafted, accepted, promised, tokens)


def costs(text: list[int], context: int) -> dict[str, float]:
    """Microseconds: the whole prompt, and a step that appends a token and asks for 8."""
    found = {}
    for name, make in PROPOSERS.items():
        proposer, tokens = make(), text[:context]
        begin = time.process_time()
        proposer.propose([Wish("a", tokens, context, 0)], WORTH)
        found[f"{name}: prompt of {context:,} tokens"] = (time.process_time() - begin) * 1e6
        for what, most in (("only learns", 0), ("drafts up to 8", 8)):
            coming = text[len(tokens) : len(tokens) + 1000]
            begin = time.process_time()
            for token in coming:
                tokens.append(token)
                proposer.propose([Wish("a", tokens, context, most)], WORTH)
            found[f"{name}: one more token after {context:,}, {what}"] = (time.process_time() - begin) * 1e6 / len(coming)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder:0.5b")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    tokenizer = load_tokenizer(resolve(options.model))
    source = tokenizer.encode(evaluation_texts()["python"], add_special=False)
    spent = {name: us for context in (1024, 8192, 32768) for name, us in costs(source, context).items()}
    rng = random.Random(1)
    for name, text in (("one token again and again", [7] * 40_000), ("two tokens at random", [rng.randrange(2) for _ in range(40_000)])):
        spent |= {f"{what}, {name}": us for what, us in costs(text, 32768).items()}
    found = [
        simulate(case, name, most)
        for case in cases(lambda text: tokenizer.encode(text, add_special=False))
        for name in PROPOSERS
        for most in (4, 8, 16)
    ]
    if options.json:
        print(json.dumps({"us": spent, "reference_step_us": STEP_US, "truth": [truth._asdict() for truth in found]}))
        return
    for what, us in spent.items():
        print(f"{what:<80} {us:9.1f} us {us / STEP_US:7.2%} of a 4 ms step")
    print(f"\n{'':<45} {'':<7} {'most':>4} {'accepted':>8} {'of most':>7} {'of drafted':>10} {'promised/accepted':>17} {'tokens/step':>11}")
    for t in found:
        each = t.accepted / max(t.drafts, 1)
        print(
            f"{t.case:<45} {t.proposer:<7} {t.most:4} {each:8.2f} {each / t.most:7.0%} {t.accepted / max(t.drafted, 1):10.0%} "
            f"{t.promised / max(t.accepted, 1):17.2f} {t.tokens / t.steps:11.2f}"
        )


if __name__ == "__main__":
    main()

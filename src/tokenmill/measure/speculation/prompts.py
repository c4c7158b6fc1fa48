"""What is asked for: answers that repeat a text, quote it, or have nothing to copy. Texts are those that every machine with Python has."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tokenmill.core.errors import ConfigError
from tokenmill.text.samples import evaluation_texts

MOST = 16
"""Prompts of a workload that differ."""

TEXTS = 4
"""Of edit and extract: so many prompts have texts of their own, those after them ask something else of the same texts."""

FILE_LINES = 150
QUOTED_CHARACTERS = 2400
"""About 600 tokens."""

QUESTIONS = (
    "List the six most important statements of this text as literal quotes, one per line, each with a short comment.",
    "Summarise this text in six points. Each point ends with the sentence that it rests on, quoted word for word.",
    "Which rules does this text state? Quote each of them literally and say in a few words what it means.",
    "Extract all definitions from this text: the term, a colon, and the sentence of the text that explains it, unchanged.",
)

CODE = (
    "Write a Python class for an LRU cache with get and put, and a short example of its use.",
    "Write a Python function that parses a CSV line with quoted fields, without the csv module.",
    "Write a binary search tree in Python with insert, delete, and an in-order iterator.",
    "Write a Python program that counts the words of a text file and prints the ten most frequent ones.",
    "Write a C function that reverses a singly linked list, with the struct and a main that tests it.",
    "Write a JavaScript function that debounces another function, and explain it in comments.",
    "Write a SQL schema for a library with books, members and loans, and a query for all loans that are overdue.",
    "Write a Python decorator that retries a function with exponential backoff.",
    "Write quicksort and mergesort in Python, each as a function of its own.",
    "Write a Python class Matrix with addition, multiplication and transposition.",
    "Write a Rust function that says whether a string of brackets is balanced.",
    "Write an HTTP server in Python with http.server that keeps a list of tasks in memory, as JSON.",
    "Write Dijkstra's algorithm in Python with heapq, and an example graph.",
    "Write a Go function that reads numbers from standard input and prints their mean and median.",
    "Write a Python generator of prime numbers, and tests for it with unittest.",
    "Write a bash script that renames all .jpeg files below a folder to .jpg and says what it did.",
)

CHAT = (
    "Why is the sky blue? Explain it to a child.",
    "Name advantages and disadvantages of public transport.",
    "What should I think of before I adopt a dog?",
    "Tell me a short story about a lighthouse keeper who is afraid of the dark.",
    "What is the difference between weather and climate?",
    "How do I learn to swim as an adult?",
    "Describe how bread is made, from the grain to the loaf.",
    "Why did the Roman Empire fall? Give several explanations.",
    "Plan a weekend in a city that neither of us knows.",
    "Explain how vaccines work.",
    "Write a friendly letter to a neighbour whose music is too loud.",
    "What makes a good teacher?",
    "How does a bicycle stay upright?",
    "Give advice to somebody who has just lost a job.",
    "What would happen if the Moon disappeared?",
    "Compare tea and coffee: history, taste, and effects.",
)


def _edit(number: int) -> str:
    """A file and a name in it that is to be changed, everything else as it is."""
    file = _excerpt(evaluation_texts()["python"], number % TEXTS)
    names = list(dict.fromkeys(re.findall(r"(?:def |self\.|^ +)(\w{4,})(?=\(| = )", file, re.MULTILINE)))
    name = names[number // TEXTS % len(names)]
    asked = f"Rename `{name}` to `{name}_renamed` in this file. Repeat the whole file with that change and nothing else."
    return f"```python\n{file}\n```\n\n{asked}"


def _excerpt(source: str, number: int) -> str:
    """Lines from one of the first top-level definitions after that share of the source on."""
    lines = source.splitlines()
    start = number * len(lines) // (TEXTS + 1)
    start = next(at for at in range(start, len(lines)) if re.match(r"(def|class) ", lines[at]))
    return "\n".join(lines[start : start + FILE_LINES])


def _extract(number: int) -> str:
    english = evaluation_texts()["english"]
    start = english.index("\n\n", number % TEXTS * len(english) // TEXTS) + 2
    text = english[start : english.index("\n\n", start + QUOTED_CHARACTERS)]
    return f"{text}\n\n---\n{QUESTIONS[number // TEXTS % len(QUESTIONS)]}"


class Workload(NamedTuple):
    """prompt: of each number, of which the first `MOST` differ. tokens: of an answer at most."""

    prompt: Callable[[int], str]
    tokens: int


WORKLOADS: Mapping[str, Workload] = {
    "edit": Workload(_edit, 1600),  # all of most files
    "extract": Workload(_extract, 256),
    "code": Workload(lambda number: CODE[number % len(CODE)], 256),
    "chat": Workload(lambda number: CHAT[number % len(CHAT)], 256),
}
"""By name."""


def parse_workloads(text: str) -> list[str]:
    """Raises `ConfigError`."""
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in WORKLOADS:
            raise ConfigError(f"--workloads: there is no {name!r}, only {', '.join(WORKLOADS)}", param="--workloads")
    return names

"""What models are asked for: sums and numbers with one right answer, and open questions without one."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

ARITHMETIC, COPYING = "arithmetic", "copying"
SUMS, LISTS, LIST_LENGTH = 40, 12, 16
OPEN_TOKENS = 96

OPEN: dict[str, tuple[str, ...]] = {
    "english": (
        "Why is the sky blue? Explain it to a child.",
        "Name three advantages and three disadvantages of public transport.",
        "Summarise in two sentences what a hash table is and when to use one.",
        "Write a short, friendly email that moves a meeting from Monday to Thursday.",
        "What is the difference between weather and climate?",
        "List the planets of the solar system with one fact about each.",
        "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Explain each step.",
        "Translate into French, German and Spanish: The library opens at nine.",
    ),
    "code": (
        "Write a Python function that checks whether a string is a palindrome, ignoring case and spaces.",
        "Write a SQL query that gives the three customers with the highest total of orders.",
        "What does this print? for i in range(3): print(i * i, end=' ')",
        "Write a bash command that counts the lines of all .py files below the current folder.",
        "Find the bug: def mean(xs): return sum(xs) / len(xs) if xs else 1 / 0",
        "Write a C function that reverses a singly linked list.",
        "Explain what a race condition is and show one in Python.",
        "Turn this into JSON: name Alice, age 30, languages French and English.",
    ),
    "chinese": (
        "请用两句话解释什么是光合作用。",
        "写一首关于秋天的四行短诗。",
        "北京和上海有什么不同？请列出三点。",
        "把这句话翻译成英文：图书馆早上九点开门。",
        "用 Python 写一个函数，计算列表中所有偶数的和。",
        "小明有 24 个苹果，送给朋友 7 个，又买了 15 个。他现在有多少个苹果？请写出步骤。",
        "为什么经常运动对身体有好处？",
        "请把这些词按拼音顺序排列：香蕉、苹果、橙子、葡萄。",
    ),
}


@dataclass(frozen=True)
class Task:
    """A prompt; numbers: those that a right answer has, in this order, or none of an open question."""

    kind: str
    prompt: str
    max_tokens: int
    numbers: tuple[str, ...] = ()

    def score(self, answer: str) -> float | None:
        """Share of the numbers that are right: of a sum the last number of the answer counts, of a list each one in its place."""
        if not self.numbers:
            return None
        found: list[str] = re.findall(r"\d+", answer.replace(",", " ") if len(self.numbers) > 1 else answer.replace(",", ""))
        if len(self.numbers) == 1:
            found = found[-1:]
        right = [a == b for a, b in zip(self.numbers, found, strict=False)]
        return sum(right) / len(self.numbers)


def all_tasks(seed: int) -> list[Task]:
    """The open questions are always the same; sums and lists are drawn by `seed`."""
    rng = np.random.default_rng(seed)
    asked = [Task(kind, prompt, OPEN_TOKENS) for kind, prompts in OPEN.items() for prompt in prompts]
    return [*(_sum(rng, i) for i in range(SUMS)), *(_list(rng) for _ in range(LISTS)), *asked]


def _sum(rng: np.random.Generator, number: int) -> Task:
    a, b = sorted(rng.integers(100, 1000, 2).tolist(), reverse=True)
    sign, result = (("+", a + b), ("-", a - b))[number % 2]
    return Task(ARITHMETIC, f"What is {a} {sign} {b}? Answer with the number only.", 24, (str(result),))


def _list(rng: np.random.Generator) -> Task:
    numbers = tuple(map(str, rng.integers(10**6, 10**7, LIST_LENGTH).tolist()))
    prompt = f"Repeat these numbers exactly and in the same order, one per line, and nothing else:\n{', '.join(numbers)}"
    return Task(COPYING, prompt, 10 * LIST_LENGTH, numbers)

"""What a chat template may do with values: operators, and methods of texts and collections. Everything pays first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import BuiltinMethodType
from typing import Any

from jinja2 import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokenmill.text.budget import Budget, BudgetExceeded

METHODS: dict[type, frozenset[str]] = {
    str: frozenset(
        {
            "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
            "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix",
            "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith",
            "strip", "swapcase", "title", "upper",
        }
    ),
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
}  # fmt: skip
"""The methods that may be called, by the type they belong to."""

_LONGEST_NUMBER_BITS = 4096
_LONGEST_NEEDLE = 1000
"""For the searches of `str` whose time is the product of both lengths."""

_PRODUCT_TIME = frozenset({"rfind", "rindex", "rpartition", "rsplit", "strip", "lstrip", "rstrip"})
_WIDE_FORMAT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d{4,}|\d*\.(?:\*|\d{4,}))")

_OPERATORS = ImmutableSandboxedEnvironment.default_binop_table


def arithmetic(budget: Budget, operator: str, left: Any, right: Any) -> Any:
    """A binary operator on numbers; `+` and `*` on texts and lists; `%` on a text."""
    budget.step()
    if isinstance(left, Undefined) or isinstance(right, Undefined):
        return _OPERATORS[operator](left, right)
    if operator == "%" and isinstance(left, str):
        return percent(budget, left, right)
    if _are_numbers(left, right):
        _check_numbers(operator, left, right)
        return _OPERATORS[operator](left, right)
    for kind in (str, list, tuple):
        if operator == "+" and isinstance(left, kind) and isinstance(right, kind):
            _pay_for(budget, kind, len(left) + len(right))
            return _OPERATORS[operator](left, right)
        if operator == "*" and {type(left), type(right)} in ({kind, int}, {kind, bool}):
            many, times = (left, right) if isinstance(left, kind) else (right, left)
            _pay_for(budget, kind, len(many) * max(times, 0))
            return _OPERATORS[operator](left, right)
    raise TypeError(f"{operator} does not go between {type(left).__name__} and {type(right).__name__}")


def percent(budget: Budget, form: str, values: Any) -> str:
    """`form % values`."""
    if _WIDE_FORMAT.search(form):
        raise BudgetExceeded("a field of a % format is wider than 999 characters")
    check_integers(values if isinstance(values, tuple) else (values,))
    budget.size(len(form) + form.count("%") * (budget.weigh(values) + 1000))
    return str(form % values)


def call_method(budget: Budget, method: BuiltinMethodType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a method of a text or a collection."""
    owner, name = method.__self__, method.__name__
    assert any(isinstance(owner, kind) and name in names for kind, names in METHODS.items())
    if isinstance(owner, str):
        check_integers((*args, *kwargs.values()))
        _pay_for_text(budget, owner, name, args)
    elif name in ("count", "index"):
        budget.weigh(owner)
        budget.weigh(list(args))
    elif name == "get":
        budget.weigh(list(args[:1]))
    return budget.made(method(*args, **kwargs))


def _pay_for_text(budget: Budget, text: str, name: str, args: tuple[Any, ...]) -> None:
    if name == "join":
        pay_for_join(budget, text, args[0] if args else ())
    elif name == "replace":
        pay_for_replace(budget, text, *args[:2])
    elif name in _PRODUCT_TIME:
        check_needle(*args[:1])


def pay_for_join(budget: Budget, separator: str, values: Any) -> None:
    if not isinstance(values, (list, tuple, str)):
        raise TypeError("join takes a list")
    budget.size(budget.weigh(list(values)) + len(separator) * len(values))


def pay_for_replace(budget: Budget, text: str, old: Any = "", new: Any = "") -> None:
    if isinstance(old, str) and isinstance(new, str):
        budget.size(len(text) + text.count(old) * len(new))


def check_needle(needle: Any = None) -> None:
    if isinstance(needle, str) and len(needle) > _LONGEST_NEEDLE:
        raise BudgetExceeded(f"it searches from the end, or strips, with more than {_LONGEST_NEEDLE} characters")


def check_integers(values: Any) -> None:
    """Refuse whole numbers whose arithmetic or print takes long."""
    for value in values:
        if isinstance(value, int) and value.bit_length() > _LONGEST_NUMBER_BITS:
            raise BudgetExceeded(f"a number has more than {_LONGEST_NUMBER_BITS} bits")


def _are_numbers(left: Any, right: Any) -> bool:
    return isinstance(left, (int, float)) and isinstance(right, (int, float))


def _check_numbers(operator: str, left: Any, right: Any) -> None:
    check_integers((left, right))
    if operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _LONGEST_NUMBER_BITS:
        raise BudgetExceeded(f"a power has more than {_LONGEST_NUMBER_BITS} bits")


def _pay_for(budget: Budget, kind: Callable[..., Any], length: int) -> None:
    if kind is str:
        budget.size(length)
    else:
        budget.entries(length)

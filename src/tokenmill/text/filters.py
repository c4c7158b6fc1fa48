"""The filters and tests that a chat template may use. Each pays for what it does; there are no others."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import Environment, pass_environment
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.tests import TESTS
from markupsafe import escape

from tokenmill.text.budget import Budget, BudgetExceeded
from tokenmill.text.operations import check_integers, check_needle, pay_for_join, pay_for_replace, percent

Filter = Callable[..., Any]
Account = Callable[[], Budget]
"""Gives the budget of the rendering under way."""

_LARGEST_WIDTH = 1000
_JINJA_FILTERS: Mapping[str, Any] = FILTERS
_JINJA_TESTS: Mapping[str, Any] = TESTS

_FILTERS = (
    *("abs", "count", "d", "default", "first", "float", "int", "items", "last", "length"),
    *("map", "reject", "rejectattr", "reverse", "select", "selectattr"),
)
_WALKING_FILTERS = ("capitalize", "dictsort", "lower", "max", "min", "sort", "title", "unique", "upper")
_TESTS = (
    *("boolean", "callable", "defined", "divisibleby", "even", "false", "float", "integer", "iterable", "mapping", "none"),
    *("number", "odd", "sameas", "sequence", "string", "true", "undefined"),
)
_WALKING_TESTS = (
    *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower", "lt"),
    *("ne", "upper"),
)


def filters(account: Account) -> dict[str, Filter]:
    """Filters by name."""
    known = {name: _paying(account, _JINJA_FILTERS[name]) for name in _FILTERS}
    known |= {name: _paying(account, _JINJA_FILTERS[name], walks=True) for name in _WALKING_FILTERS}
    own: dict[str, Filter] = {
        "e": _escape,
        "escape": _escape,
        "format": _format,
        "indent": _indent,
        "list": Budget.to_list,
        "replace": _replace,
        "round": _round,
        "safe": _string,
        "string": _string,
        "sum": _sum,
        "tojson": _tojson,
        "trim": _trim,
    }
    known |= {name: _on_account(account, filter) for name, filter in own.items()}
    return known | {"join": pass_environment(lambda environment, *args, **kwargs: _join(account(), environment, *args, **kwargs))}


def tests(account: Account) -> dict[str, Filter]:
    """Tests by name."""
    known = {name: _paying(account, _JINJA_TESTS[name]) for name in _TESTS}
    return known | {name: _paying(account, _JINJA_TESTS[name], walks=True) for name in _WALKING_TESTS}


def _paying(account: Account, filter: Filter, *, walks: bool = False) -> Filter:
    """Jinja's own filter or test, for those whose result is no larger than what it is made of.

    `walks` says that it compares, hashes or prints whole values, which then pay for that.
    """

    @functools.wraps(filter)
    def paid(*args: Any, **kwargs: Any) -> Any:
        budget = account()
        budget.step()
        check_integers((*args, *kwargs.values()))
        if walks:
            args = tuple(_walked(budget, value) for value in args)
        made = filter(*args, **kwargs)
        return budget.each(made) if isinstance(made, Iterator) else budget.made(made)

    return paid


def _on_account(account: Account, filter: Filter) -> Filter:
    @functools.wraps(filter)
    def paid(*args: Any, **kwargs: Any) -> Any:
        budget = account()
        budget.step()
        return filter(budget, *args, **kwargs)

    return paid


def _walked(budget: Budget, value: Any) -> Any:
    if isinstance(value, Iterator):
        value = budget.to_list(value)
    if isinstance(value, (list, tuple, Mapping)):
        budget.weigh(value)
    return value


def _string(budget: Budget, value: Any) -> str:
    if isinstance(value, str):
        return value
    budget.size(budget.weigh(value))
    return str(value)


def _escape(budget: Budget, value: Any) -> str:
    return budget.made(str(escape(_string(budget, value))))


def _format(budget: Budget, value: Any, *args: Any, **kwargs: Any) -> str:
    return percent(budget, _string(budget, value), kwargs or args)


def _indent(budget: Budget, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = _string(budget, value)
    columns = len(width) if isinstance(width, str) else width
    _check_width("indent", columns)
    budget.size(len(text) + (len(text.splitlines()) + 1) * columns)
    return str(_JINJA_FILTERS["indent"](text, width, first, blank))


def _join(budget: Budget, environment: Environment, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    budget.step()
    separator = _string(budget, d)
    values = budget.to_list(value)
    if attribute is not None:
        values = [make_attrgetter(environment, attribute)(entry) for entry in values]
    pay_for_join(budget, separator, values)
    return separator.join(map(str, values))


def _replace(budget: Budget, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (_string(budget, part) for part in (value, old, new))
    pay_for_replace(budget, text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _round(budget: Budget, value: float, precision: int = 0, method: str = "common") -> Any:
    _check_width("round", abs(precision))
    check_integers((value,))
    return _JINJA_FILTERS["round"](value, precision, method)


def _sum(budget: Budget, values: Any, start: float = 0) -> float:
    total = start
    for value in budget.each(values):
        check_integers((value, total))
        if not isinstance(value, (int, float)) or not isinstance(total, (int, float)):
            raise TypeError(f"sum adds numbers, not a {type(value).__name__}")
        total += value
    return total


def _tojson(
    budget: Budget,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As Hugging Face defines it: plain JSON, not escaped for HTML."""
    _check_width("tojson", indent or 0)
    budget.size(budget.weigh(value, indent or 0) * (6 if ensure_ascii else 1))
    return budget.made(json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys))


def _trim(budget: Budget, value: Any, chars: str | None = None) -> str:
    check_needle(chars)
    return _string(budget, value).strip(chars)


def _check_width(name: str, value: Any) -> None:
    if not isinstance(value, int) or not 0 <= value <= _LARGEST_WIDTH:
        raise BudgetExceeded(f"{name} is asked for a width of {value!r}, and 0 to {_LARGEST_WIDTH} is allowed")

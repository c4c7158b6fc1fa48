"""The Jinja environment in which a model's chat template runs: closed, and on a budget.

Jinja's own sandbox keeps a template away from Python's internals. This one also bounds what it can use (`budget.py`):
syntax, filters, tests, methods and functions are lists of what is allowed, each of which pays for what it does, and
the syntax tree is rewritten so that loops, comparisons and concatenations pay too.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from tokenmill.text.budget import Budget
from tokenmill.text.filters import filters, tests
from tokenmill.text.operations import METHODS, arithmetic, call_method

_SYNTAX = frozenset(
    {
        nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Macro, nodes.CallBlock, nodes.FilterBlock,
        nodes.With, nodes.Assign, nodes.AssignBlock, nodes.Scope, nodes.Break, nodes.Continue, nodes.Name, nodes.NSRef, nodes.Const,
        nodes.Tuple, nodes.List, nodes.Dict, nodes.Pair, nodes.Keyword, nodes.CondExpr, nodes.Filter, nodes.Test, nodes.Call,
        nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand, nodes.Add, nodes.Sub, nodes.Mul,
        nodes.Div, nodes.FloorDiv, nodes.Mod, nodes.Pow, nodes.And, nodes.Or, nodes.Not, nodes.Neg, nodes.Pos,
    }
)  # fmt: skip
_LOOP = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "depth", "depth0", "previtem", "nextitem"})
_LOOP_METHODS = frozenset({"cycle", "changed"})
_ADDED_BY_JINJA = frozenset({"_loop_vars", "_block_vars"})
"""Arguments in the generated code that `Context.call` takes off again."""

_WALKED = (list, tuple, Mapping, MappingView)
_PLAIN = (str, int, float, type(None), Undefined)


class Sandbox(ImmutableSandboxedEnvironment):
    """Compiles templates with `build`; they run inside `spending`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        """`functions` are what a template may call, beside `range`, `dict` and `namespace`."""
        # Without the optimizer no expression runs at compile time, when nothing has been paid.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[loopcontrols, _Generation])
        self._budget: ContextVar[Budget] = ContextVar("budget")
        # A `finalize` that takes the context is never run at compile time either.
        self.finalize = pass_context(lambda _, value: self._printed(value))
        self.concat = self._join  # type: ignore[method-assign]
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace")} | dict(functions)
        self._functions = tuple(self.globals.values())
        self.filters.clear()
        self.filters.update(filters(self._budget.get), _turn=self._turn, _compared=self._compared, _joined=self._join, _made=self._made)
        self.tests.clear()
        self.tests.update(tests(self._budget.get))

    def build(self, source: str) -> Template:
        """A template; raises `TemplateSyntaxError` or, for syntax that is not allowed, `SecurityError`."""
        tree = self.parse(source)
        for node in _all_nodes(tree):
            if type(node) not in _SYNTAX:
                raise SecurityError(f"line {node.lineno}: {type(node).__name__} is not available in a chat template")
        return self.template_class.from_code(self, self.compile(_Paying().visit(tree)), self.globals)

    @contextlib.contextmanager
    def spending(self, budget: Budget) -> Iterator[None]:
        token = self._budget.set(budget)
        try:
            yield
        finally:
            self._budget.reset(token)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, LoopContext):
            return attr in _LOOP or attr in _LOOP_METHODS
        return isinstance(obj, Namespace) or any(isinstance(obj, kind) and attr in names for kind, names in METHODS.items())

    def is_safe_callable(self, obj: Any) -> bool:
        if isinstance(obj, (Macro, LoopContext)) or any(obj is function for function in self._functions):
            return True
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, LoopContext):
            return obj.__name__ in _LOOP_METHODS
        return isinstance(obj, types.BuiltinMethodType) and isinstance(owner, tuple(METHODS))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = self._budget.get()
        budget.step()
        if isinstance(obj, Undefined):
            return obj()
        if not self.is_safe_callable(obj):
            raise SecurityError(f"a {type(obj).__name__} cannot be called in a chat template")
        if isinstance(obj, types.BuiltinMethodType):
            named = {name: value for name, value in kwargs.items() if name not in _ADDED_BY_JINJA}
            return call_method(budget, obj, args, named)
        if not isinstance(obj, (Macro, LoopContext)):
            for value in (*args, *(value for name, value in kwargs.items() if name not in _ADDED_BY_JINJA)):
                self._compared(value)
        return context.call(obj, *args, **kwargs)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, _PLAIN):
            raise SecurityError(f"a {type(argument).__name__} cannot be a key in a chat template")
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return arithmetic(self._budget.get(), operator, left, right)

    def _turn(self, value: Any) -> Any:
        self._budget.get().step()
        return value

    def _made(self, value: Any) -> Any:
        return self._budget.get().made(value)

    def _compared(self, value: Any) -> Any:
        """Pay for a value that will be compared, hashed or copied as a whole."""
        if isinstance(value, _WALKED):
            self._budget.get().weigh(value)
        return value

    def _printed(self, value: Any) -> Any:
        if not isinstance(value, _PLAIN):
            budget = self._budget.get()
            budget.size(budget.weigh(value))
        return value

    def _join(self, parts: Iterable[Any]) -> str:
        texts = [part if isinstance(part, str) else str(self._printed(part)) for part in parts]
        self._budget.get().size(sum(map(len, texts)))
        return "".join(texts)


class _Paying(NodeTransformer):
    """Rewrites a tree so that what Jinja runs without asking the environment pays as well."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the visitor's own naming
        self.generic_visit(node)
        turn = nodes.Filter(nodes.Const(True), "_turn", [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(turn))
        if node.test is not None:
            node.test = nodes.And(turn, node.test)
        return node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_compared")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_compared")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        # Around the sliced value too: Python warns about a slice of a literal when it compiles one.
        node.node = _filtered(node.node, "_turn")
        return _filtered(node, "_made")

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        node.key = _filtered(node.key, "_compared")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), "_joined")


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _all_nodes(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for child in node.iter_child_nodes():
        yield from _all_nodes(child)


class _Generation(Extension):
    """`{% generation %}` marks the answers in a conversation for training; for a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

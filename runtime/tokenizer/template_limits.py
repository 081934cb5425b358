"""Limits on the time and memory of chat templates, which are programs of strangers that run before the first token.

jinja2's sandbox keeps a template away from Python, but not from a loop without end or a string of 20 GB. Here every
iteration, call and filter counts as a step, every value that a template makes is weighed, and what could grow in a
single step is judged before it runs.
"""

import re
import time
from collections.abc import Iterable, Iterator, KeysView, Mapping, ValuesView
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from types import GeneratorType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from nibblelm.errors import TokenizerError

STEPS = 500_000
WEIGHT = 1 << 24  # characters of one value, an item of a list counting as 32
TOTAL = 1 << 28  # characters of all texts that are made on the way, a look at an item counting as 16
SECONDS = 10.0  # of this thread, so that a busy machine does not matter
SOURCE = 1 << 20  # characters of the template itself
WIDTH = 1 << 16  # of padding, and digits of a number

_MULTIPLY = {"expandtabs", "format", "format_map", "indent", "join", "tojson", "translate", "wordwrap", "%"}
_WIDEN = {"center", "ljust", "rjust", "round", "zfill"}
_UNUSED = ("batch", "groupby", "slice", "urlize", "xmlattr")  # no chat template needs them, and their work is hidden


class Budget:
    """What one rendering may still use. Raises TokenizerError where it is used up."""

    def __init__(self) -> None:
        self._steps, self._total, self._end = STEPS, TOTAL, time.thread_time() + SECONDS

    def stop(self, what: str) -> None:
        raise TokenizerError(
            f"the chat template was stopped: it {what}. That is no chat, but an attack or a mistake; repair the "
            "template, or give a plain prompt instead"
        )

    def step(self) -> None:
        """One iteration, call or filter."""
        self._steps -= 1
        if self._steps < 0:
            self.stop(f"takes more than {STEPS} steps")
        if self._steps % 64 == 0 and time.thread_time() > self._end:
            self.stop(f"takes more than {SECONDS:g} seconds")

    def make(self, weight: int, work: int) -> None:
        """A value of that weight, made by that much work."""
        self._total -= work
        if weight > WEIGHT or self._total < 0:
            self.stop(f"makes a text of more than {WEIGHT} characters, or of {TOTAL} in all")

    def weigh(self, value: Any, widths: bool = False) -> int:
        """The weight of a value with all that is in it, as often as it is in it; `widths`: an integer is its value."""
        weight, looks, stack = 0, 0, [value]
        while stack and weight <= WEIGHT:
            item = stack.pop()
            looks += 1
            if isinstance(item, str):
                weight += len(item)
                continue
            weight += abs(item) if widths and isinstance(item, int) else 32
            if isinstance(item, Mapping):
                stack += (*item.keys(), *item.values())
            elif isinstance(item, list | tuple | AbstractSet | KeysView | ValuesView):
                stack += item
        self.make(weight, 16 * looks)
        return weight

    def grow(self, name: str, value: Any, arguments: Iterable[Any]) -> None:
        """Judge an operation on `value` whose result may be larger than what goes into it."""
        arguments = list(arguments)
        numbers = [abs(a) for a in arguments if isinstance(a, int)]
        if name == "replace" and isinstance(value, str) and all(isinstance(a, str) for a in arguments[:2]):
            self.make(value.count(arguments[0]) * len(arguments[1]) if len(arguments) > 1 else 0, 0)
        elif name in _MULTIPLY:
            if name == "tojson":  # an indent in spaces or as text, and the two separators
                arguments = [sum(map(len, a)) if isinstance(a, tuple) else a for a in arguments]
                numbers = [abs(a) for a in arguments if isinstance(a, int)]
            formats = name in ("format", "format_map", "%")
            others = [self.weigh(a, formats) for a in arguments if a is not None and not isinstance(a, int)]
            if formats:
                numbers += [int(digits[:9]) for digits in re.findall(r"\d+", value)]
            if (self.weigh(value) + 1) * (sum(numbers) + sum(others)) > 4 * WEIGHT:
                self.stop(f"makes a text of more than {WEIGHT} characters by {name}")
        elif name in _WIDEN and max(numbers, default=0) > WIDTH:
            self.stop(f"makes a text or number of more than {WIDTH} characters by {name}")


_budget: ContextVar[Budget] = ContextVar("budget")


class _Namespace(Namespace):
    """Without a text of its own, in which other namespaces could be repeated without end."""

    __repr__ = object.__repr__


class _Marks(NodeTransformer):
    """Puts the hooks into a template's syntax tree, where jinja2 has none of its own."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        node.iter = _filter(node.iter, "_counted")
        return self.generic_visit(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def _made(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filter(node, "_weighed")

    visit_List = visit_Tuple = visit_Dict = _made

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(node, "_weighed") if isinstance(node.arg, nodes.Slice) else node


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for value in values:
        budget.step()
        yield value


def _weighed(value: Any) -> Any:
    if isinstance(value, str):
        _budget.get().make(len(value), len(value))
    elif not isinstance(value, int | float):
        _budget.get().weigh(value)
    return value


def _concat(parts: Iterable[Any]) -> str:
    """The text of all parts, of which none is long enough to do harm by itself."""
    texts, length = [], 0
    for part in parts:
        texts.append(_weighed(str(part if isinstance(part, str) else _weighed(part))))
        length += len(texts[-1])
        _budget.get().make(length, 0)
    return "".join(texts)


@pass_context  # which also keeps jinja2 from computing constants while it compiles
def _finalized(_: Context, value: Any) -> Any:
    _budget.get().step()
    return value if isinstance(value, str) else _weighed(value)


def _limited(name: str, function: Any) -> Any:
    """A filter of jinja2 that counts as a step, of which arguments and result are judged."""

    @wraps(function)  # with the marks for what is passed before the value
    def limited(*arguments: Any, **options: Any) -> Any:
        budget = _budget.get()
        budget.step()
        first = 1 if hasattr(function, "jinja_pass_arg") else 0
        before, (value, *rest) = arguments[:first], arguments[first:]
        if isinstance(value, GeneratorType):
            value = list(value)  # no longer than the list it comes from
        others = [*rest, *options.values()]
        # of a list that is joined, the separator is the text that is repeated
        budget.grow(name, *((others[0] if others else "", [value]) if name == "join" else (value, others)))
        result = function(*before, value, *rest, **options)
        return result if isinstance(result, GeneratorType) else _weighed(result)

    return limited


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2 with the limits of this file; templates compiled by it run under `limits` only."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(_concat)

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_finalized, **options)
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]
        for name in _UNUSED:
            del self.filters[name]

    def seal(self) -> None:
        """Put the limits around every filter that is there by now."""
        self.filters = {name: _limited(name, function) for name, function in self.filters.items()}
        self.filters.update(_counted=_counted, _weighed=_weighed, _concat=_concat)

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> Any:
        return super()._generate(_Marks().visit(source), *arguments, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if operator == "%" and isinstance(left, str):
            budget.grow("%", left, [right])
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * right > WIDTH:
                budget.stop(f"makes a number of more than {WIDTH} bits")
        elif operator == "*":
            for count, value in ((left, right), (right, left)):
                if isinstance(count, int) and isinstance(value, int) and count.bit_length() > WIDTH:
                    budget.stop(f"makes a number of more than {WIDTH} bits")
                if isinstance(count, int) and not isinstance(value, int):
                    budget.make(max(count, 0) * budget.weigh(value), 0)
        return _weighed(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *arguments: Any, **options: Any) -> Any:
        budget = _budget.get()
        budget.step()
        text = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # of a method of a text
        if isinstance(text, str):
            budget.grow(__obj.__name__, text, (*arguments, *options.values()))
        elif isinstance(__obj, Macro):
            _weighed((*arguments, *options.values()))
        return _weighed(super().call(__context, __obj, *arguments, **options))


def limits() -> None:
    """Begin a new budget for the rendering that follows in this thread."""
    _budget.set(Budget())


def strftime_now(pattern: str, now: datetime | None = None) -> str:
    """The time of day as transformers gives it to templates; the C library pads to any width it is asked for."""
    _budget.get().grow("format", pattern, [8])
    return (now or datetime.now()).strftime(pattern)

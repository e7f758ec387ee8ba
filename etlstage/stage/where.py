"""
Conditions on a JSON document, such as ``total >= 0 and currency in ["EUR", "USD"]``.

Conditions are parsed with Python's grammar, of which only a few nodes are evaluated:
names are members of the object (``this`` is the whole document, ``address.city`` and
``this["zip code"]`` are members of members), and there are comparisons, ``and``,
``or``, ``not``, ``in`` a list, arithmetic with numbers, ``null``, ``true`` and
``false``. Nothing can be called, and large numbers do not take longer.

A missing member is null. Arithmetic with anything but numbers is null, as is a division
by zero; an order between two values that are not both numbers, or both texts, is false.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

__all__ = ("Condition", "condition", "equal")

Condition: TypeAlias = Callable[[Any], bool]
"""Returns whether a document, as parsed by ``json``, meets the condition."""
_Value: TypeAlias = Callable[[Any], Any]

_LONGEST: Final = 1000  # characters
_DEEPEST: Final = 64  # levels of nested nodes, each of which takes a call
_NESTED: Final = "is not a condition: it is nested too deeply"
_WIDEST: Final = 256  # bits up to which whole numbers are calculated exactly
_BEFORE_NAME: Final = re.compile(r"[.\s\\]")
_WORDS: Final[Mapping[str, object]] = {"null": None, "true": True, "false": False}
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDER: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def condition(text: str) -> Condition:
    """
    Return the condition that a text expresses.

    Raises:
        ValueError: If the text is not a condition; it holds the reason.

    """
    if len(text) > _LONGEST:
        raise ValueError(f"is longer than {_LONGEST:,} characters")
    try:
        tree = ast.parse(text := text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"is not a condition: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError(_NESTED) from None
    level: list[ast.AST] = [tree.body]
    for _ in range(_DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        raise ValueError(_NESTED)
    _restore_names(tree, text)
    value = _value(tree.body)
    return lambda document: _true(value(document))


def _restore_names(tree: ast.AST, text: str) -> None:
    """Give all nodes their names as written: Python normalizes names, JSON does not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            written = ast.get_source_segment(text, node) or ""
            name = _BEFORE_NAME.split(written)[-1]
            setattr(node, "id" if isinstance(node, ast.Name) else "attr", name)


def _value(node: ast.expr) -> _Value:
    """Return a function that evaluates a node for a document."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as constant):
            return lambda _: constant
        case ast.Name(id="this"):
            return lambda document: document
        case ast.Name(id=name) if name in _WORDS:
            word = _WORDS[name]
            return lambda _: word
        case ast.Name(id=name):
            return lambda document: _member(document, name)
        case ast.Attribute(value=inner, attr=name):
            of = _value(inner)
            return lambda document: _member(of(document), name)
        case ast.Subscript(value=inner, slice=ast.Constant(value=str() | int() as key)):
            of = _value(inner)
            return lambda document: _member(of(document), key)
        case ast.BoolOp(op=op, values=nodes):
            parts, every = [_value(node) for node in nodes], isinstance(op, ast.And)
            if every:
                return lambda document: all(_true(part(document)) for part in parts)
            return lambda document: any(_true(part(document)) for part in parts)
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            of = _value(inner)
            return lambda document: not _true(of(document))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            of = _value(inner)
            return lambda document: _reckoned(operator.sub, 0, of(document))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            do, first, second = _ARITHMETIC[type(op)], _value(left), _value(right)
            return lambda document: _reckoned(do, first(document), second(document))
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _comparison(left, ops, others)
        case ast.List(elts=nodes) | ast.Tuple(elts=nodes):
            items = [_value(node) for node in nodes]
            return lambda document: [item(document) for item in items]
        case _:
            raise ValueError(f"can't contain {ast.unparse(node)!r}")


def _comparison(left: ast.expr, ops: list[ast.cmpop], others: list[ast.expr]) -> _Value:
    values = [_value(node) for node in (left, *others)]
    tests = [_test(op) for op in ops]

    def compared(document: Any) -> bool:
        found = [value(document) for value in values]
        return all(test(found[at], found[at + 1]) for at, test in enumerate(tests))

    return compared


def _test(op: ast.cmpop) -> Callable[[Any, Any], bool]:
    match op:
        case ast.Eq() | ast.Is():
            return equal
        case ast.NotEq() | ast.IsNot():
            return lambda a, b: not equal(a, b)
        case ast.In():
            return _among
        case ast.NotIn():
            return lambda a, b: not _among(a, b)
        case _:
            order = _ORDER[type(op)]
            return lambda a, b: _ordered(a, b) and order(a, b)


def _member(value: Any, key: str | int) -> Any:
    """Return a member of an object, or an item of a list; null if there is none."""
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, list) and isinstance(key, int):
        return value[key] if 0 <= key < len(value) else None
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ordered(a: object, b: object) -> bool:
    """Return whether two values can be ordered."""
    texts = isinstance(a, str) and isinstance(b, str)
    return texts or (_is_number(a) and _is_number(b))


def equal(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal; to Python, true equals 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return bool(a == b)


def _among(item: object, values: object) -> bool:
    """Return whether a value is in a list, a text in a text, or a name in an object."""
    if isinstance(values, list):
        return any(equal(item, value) for value in values)
    return isinstance(item, str) and isinstance(values, str | dict) and item in values


def _reckoned(do: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Return the result of an operation on two numbers, or null."""
    if not (_is_number(a) and _is_number(b)):
        return None
    try:
        return do(_narrow(a), _narrow(b))
    except (ZeroDivisionError, OverflowError):
        return None


def _narrow(number: float) -> float:
    # With exact numbers, products of products would take quadratic time.
    wide = isinstance(number, int) and number.bit_length() > _WIDEST
    return float(number) if wide else number


def _true(value: object) -> bool:
    """Return whether a value is true; no other value counts as true."""
    return value is True

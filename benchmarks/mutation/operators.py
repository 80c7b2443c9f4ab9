"""Mutants: every condition of a source file, weakened in the direction in which the prover would say more.

A condition that refuses (its branch raises, or returns nothing) is weakened to fire less often; one that admits a claim
is weakened to hold more often; one whose branches tell neither is changed both ways. `a and b` holds more often without
one operand, `a or b` less often; `<` becomes `<=`, `<=` becomes `<`; anything else becomes a constant. Conditions that
refuse nothing and only ask what kind of operation or value there is are left alone.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TEXTS = {"words", "describe", "theorem", "softmax_reason", "__str__", "in_words", "refused", "note"}
RESOURCES = {"refuse_large", "compact", "kept"}  # what they decide costs time or memory, not truth
REFUSES_WHEN_TRUE = {"followed_by_bias", "surely_alive", "reaches_reader", "moves_last", "is_transposed", "transposed"}
REFUSES_WHEN_TRUE |= {"picks_along_last"}
REFUSES_WHEN_TRUE |= {"depends_on_input", "claimed", "all_claimed", "mean_claimed", "on_residual_path", "of_experts"}
REFUSING_NAMES = {
    "short",
    "large",
    "emptied",
    "taken",
    "covered",
    "missing",
    "strangers",
    "attention",
    "table",
    "others",
}
EMPTY = ("None", "False", "[]", "()", "{}", "0", "frozenset()", "")
STRICTER = {ast.LtE: ast.Lt, ast.GtE: ast.Gt}
LOOSER = {ast.Lt: ast.LtE, ast.Gt: ast.GtE}
Direction = bool  # True: the condition holds more often


@dataclass(frozen=True)
class Mutant:
    """One condition and what it becomes. `path` leads from the module to the expression or statement."""

    file: str
    function: str
    original: str
    mutated: str
    occurrence: int  # among equal changes of one function
    path: tuple[tuple[str, int | None], ...]
    replacement: ast.AST
    truth: bool = False  # whether only the truth of its value counts

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        return self.file, self.function, self.original, self.mutated, self.occurrence


def mutants_of(root: Path, file: Path) -> list[Mutant]:
    """All mutants of one file, in its order."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    seen: dict[tuple[str, str, str], int] = {}
    mutants = []
    for place, function, replacement, truth in Visitor().everything(tree):
        node = at(tree, place)
        texts = function, shown(node), shown(replacement)
        if texts[1] == texts[2]:
            continue
        seen[texts] = seen.get(texts, -1) + 1
        mutants.append(Mutant(str(file.relative_to(root)), *texts, seen[texts], place, replacement, truth))
    return mutants


def shown(node: ast.AST) -> str:
    return ast.unparse(node)


def at(tree: ast.AST, path: tuple[tuple[str, int | None], ...]) -> ast.AST:
    for name, index in path:
        tree = getattr(tree, name) if index is None else getattr(tree, name)[index]
    return tree


Place = tuple[tuple[str, int | None], ...]
Change = tuple[Place, str, ast.AST, bool]


class Visitor:
    """Walks a module and yields every change of a condition inside a function."""

    def everything(self, tree: ast.Module) -> Iterator[Change]:
        yield from self.children(tree, (), "", None)

    def children(self, node: ast.AST, place: Place, function: str, owner: ast.FunctionDef | None) -> Iterator[Change]:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            items = enumerate(value) if isinstance(value, list) else [(None, value)]
            for index, child in items:
                if isinstance(child, ast.AST):
                    yield from self.visit(child, (*place, (name, index)), function, owner, node)

    def visit(
        self, node: ast.AST, place: Place, function: str, owner: ast.FunctionDef | None, parent: ast.AST
    ) -> Iterator[Change]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if node.name in TEXTS | RESOURCES:
                return
            function = f"{function}.{node.name}" if function else node.name
            owner = node if isinstance(node, ast.FunctionDef) else owner
        elif owner is not None:
            for replacement, where, truth in changes(node, owner, parent):
                yield (*place, *where), function, replacement, truth
        yield from self.children(node, place, function, owner)


Found = Iterator[tuple[ast.AST, Place, bool]]


def changes(node: ast.AST, owner: ast.FunctionDef, parent: ast.AST) -> Found:
    """What a statement or an expression becomes: the replacement, where below the node, whether truth alone counts."""
    negative = owner.name in REFUSES_WHEN_TRUE
    if isinstance(node, ast.If):
        yield from conditions(node.test, branch_directions(node, negative), (("test", None),))
    elif isinstance(node, ast.IfExp):
        yield from conditions(node.test, value_directions(node), (("test", None),))
    elif isinstance(node, ast.While):
        for weaker in weakened(node.test, True):
            if not isinstance(weaker, ast.Constant):
                yield weaker, (("test", None),), True
    elif isinstance(node, ast.comprehension):
        for i, test in enumerate(node.ifs):
            yield from conditions(test, (True, False), (("ifs", i),))
    elif isinstance(node, ast.Assert) and node.msg is not None:
        yield ast.Constant(True), (("test", None),), True
    elif isinstance(node, ast.Return):
        yield from returned(node, owner, parent, negative)
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.keyword)) and node.value is not None:
        yield from assigned(node)
    elif isinstance(node, ast.Call):
        yield from shifts_that_data_decides(node)
    elif isinstance(node, ast.Raise) and not guarded(node, parent):
        yield ast.Return(ast.Constant(None)), (), True
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)) and not of_bits(node):
        yield node.left, (), False
        yield node.right, (), False


def conditions(test: ast.expr, directions: tuple[Direction, ...], where: Place) -> Found:
    if any(isinstance(n, ast.NamedExpr) for n in ast.walk(test)) or (len(directions) == 2 and dispatches(test)):
        return
    for direction in directions:
        for weaker in weakened(test, direction):
            yield weaker, where, True


def dispatches(test: ast.expr) -> bool:
    """Whether a condition that refuses nothing only asks what kind of thing it has, or whether there is one."""
    if isinstance(test, ast.BoolOp):
        return all(dispatches(value) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not) and dispatches(test.operand)
    if isinstance(test, ast.Call):
        return shown(test.func) == "isinstance"
    if not isinstance(test, ast.Compare):
        return False
    absent = isinstance(test.ops[0], (ast.Is, ast.IsNot)) and shown(test.comparators[0]) == "None"
    kind = isinstance(test.left, ast.Attribute) and test.left.attr in ("op", "kind", "role")
    return absent or kind or shown(test.left) == "len(node.args)"  # arguments that were left out


def branch_directions(node: ast.If, negative: bool) -> tuple[Direction, ...]:
    if refuses(node.body, negative):
        return (False,)
    if refuses(node.orelse, negative) or any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(node)):
        return (True,)
    return (True, False)


def refuses(body: list[ast.stmt], negative: bool) -> bool:
    """Whether a branch says nothing: it raises, goes on with the next, or returns nothing of use."""
    if not body or len(body) > 2:
        return False
    last = body[-1]
    if isinstance(last, ast.Return):
        text = "" if last.value is None else shown(last.value)
        if negative:
            return text == "True"
        return text in EMPTY or text.startswith("unknown_labels")
    return isinstance(last, (ast.Raise, ast.Continue))


def value_directions(node: ast.IfExp) -> tuple[Direction, ...]:
    if shown(node.body) in EMPTY:
        return (False,)
    return (True,) if shown(node.orelse) in EMPTY else (True, False)


def returned(node: ast.Return, owner: ast.FunctionDef, parent: ast.AST, negative: bool) -> Found:
    predicate = owner.returns is not None and shown(owner.returns) == "bool"
    if not predicate or node.value is None or (isinstance(node.value, ast.Constant) and parent is not owner):
        return
    if isinstance(node.value, ast.Constant):
        if node.value.value is negative:
            yield ast.Constant(not negative), (("value", None),), True
    else:
        yield from conditions(node.value, (not negative,), (("value", None),))


def assigned(node: ast.Assign | ast.AugAssign | ast.keyword) -> Found:
    """A truth value that is kept under a name: by default a name says what admits a claim."""
    target = node.arg if isinstance(node, ast.keyword) else shown(getattr(node, "target", None) or node.targets[0])
    value, where = node.value, (("value", None),)
    if target == "fixed" and shown(value) == "False":
        yield ast.Constant(True), where, True
    elif is_condition(value):
        yield from conditions(value, (target not in REFUSING_NAMES,), where)


def is_condition(value: ast.expr) -> bool:
    called = isinstance(value, ast.Call) and shown(value.func) in ("any", "all", "bool")
    negated = isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)
    return called or negated or isinstance(value, (ast.BoolOp, ast.Compare))


def shifts_that_data_decides(node: ast.Call) -> Found:
    """Shift(label, source, False): the amount may depend on the input."""
    fixed = shown(node.args[2]) if shown(node.func) == "Shift" and len(node.args) == 3 else ""
    if fixed == "False" or fixed.endswith(".fixed"):
        yield ast.Constant(True), (("args", 2),), True


def guarded(node: ast.Raise, parent: ast.AST) -> bool:
    """A branch of an `if`, which has mutants of its own."""
    return isinstance(parent, ast.If) and node in parent.body


def of_bits(node: ast.BinOp) -> bool:
    """Arithmetic on the bits of labels and field elements."""
    sides = (node.left, node.right)
    return any(isinstance(s, ast.Constant) or shown(s) == "P" or "<<" in shown(s) for s in sides)


def weakened(test: ast.expr, direction: Direction) -> Iterator[ast.expr]:
    """The expressions that hold a little more (or less) often."""
    finer = list(refined(test, direction))
    divides = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if direction else ast.Or)
    if not divides and shown(test) not in ("True", "False"):
        yield ast.Constant(direction)
    yield from finer


def refined(test: ast.expr, direction: Direction) -> Iterator[ast.expr]:
    """Changes inside the expression; what would make all of it a constant is left to `weakened`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        for weaker in weakened(test.operand, not direction):
            if not isinstance(weaker, ast.Constant):
                yield ast.UnaryOp(ast.Not(), weaker)
    elif isinstance(test, ast.BoolOp):
        yield from of_operands(test, direction)
    elif isinstance(test, ast.Compare):
        table = LOOSER if direction else STRICTER
        for i, op in enumerate(test.ops):
            if type(op) in table:
                ops = [table[type(o)]() if k == i else o for k, o in enumerate(test.ops)]
                yield ast.Compare(test.left, ops, test.comparators)
    elif isinstance(test, ast.Call) and shown(test.func) in ("bool", "any", "all") and len(test.args) == 1:
        yield from of_quantifier(test, direction)


def of_operands(test: ast.BoolOp, direction: Direction) -> Iterator[ast.expr]:
    divides = isinstance(test.op, ast.And if direction else ast.Or)
    for i, operand in enumerate(test.values):
        rest = [v for k, v in enumerate(test.values) if k != i]
        if divides:
            yield rest[0] if len(rest) == 1 else ast.BoolOp(test.op, rest)
        for weaker in refined(operand, direction):
            yield ast.BoolOp(test.op, [weaker if k == i else v for k, v in enumerate(test.values)])


def of_quantifier(test: ast.Call, direction: Direction) -> Iterator[ast.expr]:
    inner = test.args[0]
    if isinstance(inner, ast.GeneratorExp):
        for weaker in refined(inner.elt, direction):
            changed = copy.deepcopy(inner)
            changed.elt = weaker
            yield ast.Call(test.func, [changed], [])
    elif shown(test.func) == "bool":
        for weaker in refined(inner, direction):
            yield ast.Call(test.func, [weaker], [])


def replaced(tree: ast.Module, mutant: Mutant) -> ast.Module:
    """The module with one change."""
    changed = copy.deepcopy(tree)
    put(changed, mutant.path, copy.deepcopy(mutant.replacement))
    return ast.fix_missing_locations(changed)


def put(tree: ast.AST, path: Place, new: ast.AST) -> None:
    (name, index), parent = path[-1], at(tree, path[:-1])
    if index is None:
        setattr(parent, name, new)
    else:
        getattr(parent, name)[index] = new

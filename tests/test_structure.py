"""How long functions are, who writes whose state, and which questions act, read from the sources.

The limit has no exceptions but functions that hand on arguments, one by one.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("compiled_ddp", "passes")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
TREES = {name: ast.parse(source, filename=name) for name, source in SOURCES.items()}

LINES_OF_A_FUNCTION = 50

# All signature and docstring, which say what each argument does; the rest hands them on.
FORWARD_ARGUMENTS = ("compiled_ddp.compiled.compile_ddp", "compiled_ddp.functional.whole_step.compile_step")

Kind = TypeVar("Kind", ast.FunctionDef, ast.ClassDef)


def definitions(kind: type[Kind], tree: ast.AST, within: str = "") -> Iterator[tuple[str, Kind]]:
    """Every function, or class, of a module with its dotted name, also those inside of others."""
    for child in ast.iter_child_nodes(tree):
        name = f"{within}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else within
        if isinstance(child, kind):
            yield name, child
        yield from definitions(kind, child, name)


def all_definitions(kind: type[Kind]) -> dict[str, Kind]:
    modules = {name: name.removesuffix(".py").replace("/", ".") for name in TREES}
    return {full: node for name, tree in TREES.items() for full, node in definitions(kind, tree, modules[name])}


def stored(tree: ast.AST) -> Iterator[ast.Attribute | ast.Subscript]:
    """What of other objects is assigned to or deleted."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node


def attributes(class_: ast.ClassDef) -> set[str]:
    """What a class declares, and what its methods store into `self`."""
    declared = [child.target for child in class_.body if isinstance(child, ast.AnnAssign)]
    of_self = [node for node in stored(class_) if isinstance(node, ast.Attribute) and is_self(node.value)]
    return {node.id for node in declared if isinstance(node, ast.Name)} | {node.attr for node in of_self}


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def stores_from_outside(tree: ast.Module, defined: set[str]) -> list[str]:
    """Stores into attributes of `defined` that no class of this module defines."""
    foreign = defined.difference(*(attributes(class_) for _, class_ in definitions(ast.ClassDef, tree)))
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in stored(tree)
        if isinstance(node, ast.Attribute) and not is_self(node.value) and node.attr in foreign
    ]


def is_question(function: ast.FunctionDef) -> bool:
    return isinstance(function.returns, ast.Name) and function.returns.id == "bool"


def acts(function: ast.FunctionDef) -> bool:
    """Whether it stores into what outlives it, sleeps, or calls what begins something or takes a note."""
    own = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = [node.attr if isinstance(node, ast.Attribute) else ast.unparse(node) for node in called]
    verbs = {name.lstrip("_").split("_")[0] for name in names}
    return any(root(node) not in own for node in stored(function)) or not verbs.isdisjoint(
        {"begin", "enter", "note", "sleep", "start"}
    )


def root(node: ast.expr) -> str:
    """`a` for a.b[c].d."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return ast.unparse(node)


def beyond(limit: int, sizes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > limit}


def test_functions_are_short() -> None:
    functions = all_definitions(ast.FunctionDef)
    lines = {name: (node.end_lineno or node.lineno) - node.lineno + 1 for name, node in functions.items()}
    assert all(lines.pop(name) for name in FORWARD_ARGUMENTS)
    assert not beyond(LINES_OF_A_FUNCTION, lines), "split what does several jobs"


def test_fields_are_written_by_the_methods_of_their_own_object() -> None:
    trees = {name: tree for name, tree in TREES.items() if "/torch_private/" not in name}  # its attributes are torch's
    defined = set[str]().union(*(attributes(class_) for class_ in all_definitions(ast.ClassDef).values()))
    found = {name: stores for name, tree in trees.items() if (stores := stores_from_outside(tree, defined))}
    assert not found, "give the class that defines the field a method that says what happens"


def test_questions_change_nothing() -> None:
    functions = all_definitions(ast.FunctionDef)
    acting = {name for name, function in functions.items() if is_question(function) and acts(function)}
    assert not acting, "what returns a bool stores nothing, waits for nothing and begins nothing"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return self.a == 1", False),
        ("found = {}; found[1] = 2; return bool(found)", False),
        ("return begun(self)", False),
        ("self.a = 1; return True", True),
        ("self.a[1] += 1; return True", True),
        ("del given[1]; return True", True),
        ("time.sleep(1); return True", True),
        ("self._begin_backward(); return True", True),
    ],
)
def test_what_acts_is_found(body: str, expected: bool) -> None:
    ((_, function),) = definitions(ast.FunctionDef, ast.parse(f"def f(self, given) -> bool: {body}"))
    assert is_question(function)
    assert acts(function) == expected


def test_stores_from_outside_are_found() -> None:
    here = "class Here:\n    def act(self, other):\n        self.a, other.a, other.here, other.grad = 1, 2, 3, 4"
    more = "\n        other.inner.b += 1\n        del other.b\n        self.here = 5"
    assert stores_from_outside(ast.parse(here + more), {"a", "b", "here"}) == [
        "line 4: other.inner.b",
        "line 5: other.b",
    ]

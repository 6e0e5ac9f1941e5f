"""What may import what, read from the sources.

Passes know the plan's plain data types, torch and the standard library; private names of torch stand in one module.
"""

import ast
import functools
import itertools
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch

from compiled_ddp.torch_private import names as private_names

ROOT = Path(__file__).resolve().parent.parent
TORCH_PRIVATE = sorted((ROOT / "compiled_ddp" / "torch_private").glob("*.py"))
PASSES = sorted((ROOT / "passes").rglob("*.py"))
SHIPPED = [
    path
    for folder in ("compiled_ddp", "passes", "benchmarks", "docs/examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path not in TORCH_PRIVATE
]
PACKAGE = [path for path in SHIPPED if path.relative_to(ROOT).parts[0] in ("compiled_ddp", "passes")]
OWN = [*PACKAGE, *TORCH_PRIVATE]
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# The rooms of the package, from the ground up: each may import those below it, and itself.
LAYERS = (
    ("keywords", "telling"),
    ("collector", "errors", "formatting", "frames", "torch_private", "users_code", "users_model"),
    ("environment", "plan"),
    ("passes",),
    ("comm_hooks", "planning"),
    ("ranks",),
    ("reducers",),
    ("options",),
    ("model",),
    ("checks",),
    ("step",),
    ("graph",),
    ("report",),
    ("wrapping",),
    ("functional", "wrapper"),
    ("compiled", "eager"),
    ("compat", "integrations"),
    ("tools",),
    ("public",),
    ("__init__", "__main__"),
)
FLOORS = {room: floor for floor, rooms in enumerate(LAYERS) for room in rooms}

# What a pass may import: these modules and what lies below them, compared in whole dotted parts.
OPEN_TO_PASSES = ("compiled_ddp.plan", "compiled_ddp.passes", "torch", "functorch", *sys.stdlib_module_names)

# Operators as they stand in captured graphs (torch.ops._c10d_functional.all_reduce), and the types of those objects,
# which have no public name and which a pass could not take from torch_private.
OPERATORS = ("torch.ops", "torch._ops.OpOverload", "torch._ops.HigherOrderOperator")

# Private by name, but documented, and needed by tests alone.
OPEN_TO_TESTS = (
    "torch._dynamo.config",
    "torch._dynamo.graph_break",
    "torch._dynamo.reset",
    "torch._register_device_module",
    "torch.distributed.optim._apply_optimizer_in_backward",
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
)


def lies_in(name: str, packages: tuple[str, ...]) -> bool:
    """Whether the dotted `name` is one of `packages` or lies below one, in whole parts."""
    return any(name == package or name.startswith(package + ".") for package in packages)


@functools.cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree, which several rules look at."""
    return list(ast.walk(tree))


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, full dotted name, name it is bound to) of each import; a relative one begins with its dots."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}", alias.asname or alias.name


def foreign_imports(tree: ast.AST) -> list[str]:
    """Imports that a pass must not have."""
    return [f"line {line}: {name}" for line, name, _ in imports(tree) if not lies_in(name, OPEN_TO_PASSES)]


def dotted_name(node: ast.expr) -> str | None:
    """`a.b.c` for an attribute chain rooted at a plain name, None for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted_name(node.value)) is not None:
        return f"{base}.{node.attr}"
    return None


def is_private(name: str) -> bool:
    parts = name.split(".")
    if parts[0] != "torch" or lies_in(name, OPERATORS):
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def private_torch_names(tree: ast.AST, allowed: tuple[str, ...] = ()) -> list[str]:
    """Private torch names that the source imports or reaches by attribute access, through an alias too."""
    imported = list(imports(tree))
    found = {(line, name) for line, name, _ in imported if is_private(name)}
    bound = {"torch": "torch"}
    for _, name, local in imported:
        if lies_in(name, ("torch",)) and local != "torch":
            bound[local] = name
    for node in nodes(tree):
        if isinstance(node, ast.Attribute) and (chain := dotted_name(node)) is not None:
            root, _, rest = chain.partition(".")
            name = f"{bound.get(root, root)}.{rest}"
            # A chain contains its own beginnings: torch._C.f holds torch._C. The longest says the most.
            if is_private(name):
                found = {(line, other) for line, other in found if line != node.lineno or not lies_in(name, (other,))}
                if not any(line == node.lineno and lies_in(other, (name,)) for line, other in found):
                    found.add((node.lineno, name))
    return [f"line {line}: {name}" for line, name in sorted(found) if not lies_in(name, allowed)]


# What makes a tensor from nothing: of the default dtype and on the default device, both of which users set.
FACTORIES = tuple(
    f"torch.{name}"
    for name in (
        *(
            "arange",
            "as_tensor",
            "asarray",
            "empty",
            "empty_permuted",
            "empty_strided",
            "eye",
            "from_file",
            "frombuffer",
        ),
        *("full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor"),
        *("sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices"),
        *("triu_indices", "zeros", "Tensor", "FloatTensor", "DoubleTensor"),
    )
)


def factory_calls_of_default_kind(tree: ast.AST) -> list[str]:
    """Calls of torch's factories that leave the dtype or the device to the defaults."""
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.Call) and dotted_name(node.func) in FACTORIES:
            missing = {"dtype", "device"} - {keyword.arg for keyword in node.keywords}
            found += [f"line {node.lineno}: {dotted_name(node.func)} without {name}" for name in sorted(missing)]
    return found


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def offenders(paths: Iterable[Path], found_in: Callable[[ast.Module], list[str]]) -> str:
    """A line for each thing that `found_in` finds in these files, which begins with the file's name."""
    assert paths
    return "".join(f"\n{relative(path)}, {found}" for path in paths for found in found_in(parse(path)))


def test_passes_import_only_plan_and_torch() -> None:
    found = offenders(PASSES, foreign_imports)
    assert not found, (
        "a pass may import only compiled_ddp.plan, compiled_ddp.passes, torch, functorch and the standard library, by "
        f"absolute names: it receives frozen data and knows nothing else of the library{found}"
    )


def test_private_torch_names_stand_in_one_module() -> None:
    found = offenders(SHIPPED, private_torch_names)
    assert not found, (
        "a private torch API is used: give it a name in compiled_ddp/torch_private, with the versions it was checked "
        f"on, and import that{found}"
    )


def test_tests_use_private_torch_names_through_torch_private() -> None:
    found = offenders(TESTS, functools.partial(private_torch_names, allowed=OPEN_TO_TESTS))
    assert not found, f"a test uses a private torch API: take it from compiled_ddp/torch_private{found}"


def test_every_factory_call_of_the_package_names_dtype_and_device() -> None:
    found = offenders(OWN, factory_calls_of_default_kind)
    assert not found, (
        "users set torch.set_default_dtype and torch.set_default_device: name the dtype and the device" + found
    )


def listed_names(table: str) -> set[str]:
    """The names in the first cells of a table: `a.b`, or several below one, as in `a.b`: `c`, `d`."""
    names = set()
    for cell in re.findall(r"^\| (.+?) \|", table, flags=re.MULTILINE):
        first, *others = re.findall(r"`([\w.]+)`", cell) or ["-"]
        below = f"{first}." if f"`{first}`: " in cell else ""
        names |= {f"{below}{other}" for other in others} | (set() if below else {first})
    return names


def names_of_torch_private() -> set[str]:
    """The private names of torch that the package uses, but for those that another of them begins with."""
    used = {found.partition(": ")[2] for path in TORCH_PRIVATE for found in private_torch_names(parse(path))}
    return {name for name in used if not any(lies_in(other, (name,)) for other in used - {name})}


def test_every_private_name_is_in_the_table() -> None:
    (face,) = (path for path in TORCH_PRIVATE if path.name == "__init__.py")
    listed = (*itertools.chain(*private_names.NAMES.values()), *listed_names(ast.get_docstring(parse(face)) or ""))
    # An import of what a name stands in says nothing yet.
    stand_in = {name for name in names_of_torch_private() if any(lies_in(other, (name,)) for other in listed)}
    missing = {name for name in names_of_torch_private() - stand_in if not lies_in(name, listed)}
    assert not missing, f"{missing}: give them a row in the table of compiled_ddp/torch_private/__init__.py"


# What older versions lack, which the package looks for before it uses it.
NOT_BEFORE = {
    "torch._inductor.custom_graph_pass.CustomInferenceAwareGraphPass": (2, 12),
    "torch._inductor.custom_graph_pass.get_custom_graph_passes": (2, 13),
}


def exists(name: str) -> bool:
    try:
        private_names.find(name)
    except (ImportError, AttributeError):
        return False
    return True


def test_every_private_name_exists_in_this_torch() -> None:
    # Below V.graph nothing is there until Inductor compiles.
    names = {name.partition(".V.graph.")[0] for name in names_of_torch_private()}
    missing = {name for name in names if not exists(name)}
    expected = {name for name in names if torch.__version__ < NOT_BEFORE.get(name, (0,))}
    assert not missing - expected, f"torch {torch.__version__} has no {sorted(missing - expected)}"
    assert not expected - missing, (
        f"NOT_BEFORE denies {sorted(expected - missing)}, which torch {torch.__version__} has"
    )


def room_of(path: Path) -> str:
    """The module, or folder, directly below the package that a source belongs to."""
    package, *parts = path.relative_to(ROOT).with_suffix("").parts
    return package if package == "passes" else parts[0]


def rooms_imported(tree: ast.AST) -> Iterator[str]:
    for _, name, _ in imports(tree):
        package, *parts = name.split(".")
        if package == "compiled_ddp" and parts:
            yield parts[0]


def test_imports_point_down() -> None:
    up = ""
    for path in OWN:
        room = room_of(path)
        not_below = {other for other in rooms_imported(parse(path)) if other != room and FLOORS[other] >= FLOORS[room]}
        up += f"\n{relative(path)} imports {not_below}, not below {room}" if not_below else ""
    assert not up, f"the table LAYERS says what may be imported from where{up}"


def test_every_room_has_a_floor_and_a_place_in_what_is_installed() -> None:
    assert {room_of(path) for path in OWN} == FLOORS.keys()
    configured = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [path.parent.relative_to(ROOT).parts for path in (ROOT / "compiled_ddp").rglob("*/__init__.py")]
    assert set(configured) == {"compiled_ddp", "compiled_ddp.passes", *map(".".join, folders)}


def test_every_module_says_what_it_holds() -> None:
    silent = [relative(path) for path in OWN if not ast.get_docstring(parse(path))]
    assert not silent, f"{silent} need a docstring: no list of files is kept by hand"


def test_the_readme_draws_these_layers() -> None:
    (picture,) = re.findall(r"^```text\n(__init__\.py.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    drawn = [line.partition("#")[0].split() for line in picture.splitlines()]
    assert [tuple(name.removesuffix("/").removesuffix(".py") for name in names) for names in drawn] == [*LAYERS[::-1]]
    folders = {"passes", *(path.parent.name for path in (ROOT / "compiled_ddp").glob("*/__init__.py"))}
    assert {name for names in drawn for name in names if name.endswith("/")} == {f"{folder}/" for folder in folders}


def test_editor_bans_for_passes_what_stands_above_them() -> None:
    config = tomllib.loads((ROOT / "passes" / "ruff.toml").read_text())
    banned = config["lint"]["flake8-tidy-imports"]["banned-api"]
    above = {room for room, floor in FLOORS.items() if floor > FLOORS["passes"] and not room.startswith("__")}
    below = {room for room, floor in FLOORS.items() if floor < FLOORS["passes"]} - {"plan"}
    assert banned.keys() == {"passes", *(f"compiled_ddp.{room}" for room in above | below)}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import compiled_ddp.plan", []),
        ("from compiled_ddp import plan", []),
        ("from compiled_ddp.plan import Bucket", []),
        ("from compiled_ddp.passes.insert import insert_all_reduces", []),
        ("import torch.fx, math\nfrom functorch.compile import min_cut_rematerialization_partition", []),
        ("from compiled_ddp.planner import plan", ["line 1: compiled_ddp.planner.plan"]),
        ("from compiled_ddp import compile_ddp", ["line 1: compiled_ddp.compile_ddp"]),
        ("def f():\n    import numpy as np", ["line 2: numpy"]),
        ("from . import insert", ["line 1: ..insert"]),
        ("import torchvision", ["line 1: torchvision"]),
    ],
)
def test_imports_are_compared_in_whole_parts(source: str, found: list[str]) -> None:
    assert foreign_imports(ast.parse(source)) == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch.ops._c10d_functional.all_reduce\ntorch.__version__", []),
        ("import torch\nmodule._parameters", []),
        ("import torch._inductor.config as config", ["line 1: torch._inductor.config"]),
        ("from torch._inductor import config", ["line 1: torch._inductor.config"]),
        ("from torch import _dynamo", ["line 1: torch._dynamo"]),
        ("import torch\ntorch._C._current_graph_task_id()", ["line 2: torch._C._current_graph_task_id"]),
        ("import torch.distributed as dist\ndist._x()", ["line 2: torch.distributed._x"]),
        ("from torch import nn\nnn.Module._call_impl", ["line 2: torch.nn.Module._call_impl"]),
        (
            "from torch.distributed.distributed_c10d import _world",
            ["line 1: torch.distributed.distributed_c10d._world"],
        ),
    ],
)
def test_private_names_are_found_through_aliases(source: str, found: list[str]) -> None:
    assert private_torch_names(ast.parse(source)) == found


def test_reset_of_dynamo_is_open_to_tests_alone() -> None:
    tree = ast.parse("import torch\ntorch._dynamo.reset()")
    assert private_torch_names(tree) == ["line 2: torch._dynamo.reset"]
    assert private_torch_names(tree, allowed=OPEN_TO_TESTS) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.zeros(3, dtype=torch.int64, device=x.device)", []),
        ("x.new_zeros(3)\ntorch.zeros_like(x)\ntorch.zeros", []),
        ("torch.tensor([1.0], device=device)", ["line 1: torch.tensor without dtype"]),
        ("torch.empty(2)", ["line 1: torch.empty without device", "line 1: torch.empty without dtype"]),
    ],
)
def test_factory_calls_are_found(source: str, found: list[str]) -> None:
    assert factory_calls_of_default_kind(ast.parse(source)) == found

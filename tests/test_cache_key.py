"""Which sources the cache keys of compiled graphs depend on: those that change the generated program, and no others."""

import ast
from collections.abc import Iterator
from pathlib import Path

from compiled_ddp import torch_private
from compiled_ddp.passes.pipeline import PASSES, SOURCES

ROOT = Path(__file__).resolve().parent.parent


def relative(paths: tuple[Path, ...]) -> set[str]:
    return {str(path.resolve().relative_to(ROOT)) for path in paths}


def source_of(module: str) -> Path:
    """compiled_ddp.a.b is a file, or a folder; compiled_ddp.passes stands beside compiled_ddp."""
    path = ROOT / module.removeprefix("compiled_ddp." if module.startswith("compiled_ddp.passes") else "").replace(
        ".", "/"
    )
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def sources_of_imports(source: Path) -> Iterator[Path]:
    """Where in this package the names are defined that a source imports; behind a folder's face, in the folder."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "compiled_ddp":
            for alias in node.names:
                yield defined_in(str(node.module), alias.name)


def defined_in(module: str, name: str) -> Path:
    if source_of(f"{module}.{name}").exists():
        return source_of(f"{module}.{name}")
    face = source_of(module)
    imports = [node for node in ast.parse(face.read_text()).body if isinstance(node, ast.ImportFrom)]
    homes = [str(node.module) for node in imports if name in {alias.name for alias in node.names}]
    return defined_in(homes[0], name) if homes and face.name == "__init__.py" else face


def test_key_depends_on_what_the_pipeline_is_made_of_and_on_no_other_source() -> None:
    pipelines = source_of("compiled_ddp.passes.pipeline"), source_of("compiled_ddp.passes.step_pipeline")
    reached = {source_of("compiled_ddp.passes"), *pipelines}
    ahead = list(reached)
    while ahead:
        new = set(sources_of_imports(ahead.pop())) - reached
        reached |= new
        ahead += new
    assert relative(SOURCES) == relative(tuple(reached))
    assert relative(SOURCES) >= {f"passes/{pass_.name}.py" for pass_ in PASSES}
    assert {name for name in relative(SOURCES) if not name.startswith("passes/")} == {
        "compiled_ddp/plan/buckets.py",
        "compiled_ddp/plan/riders.py",
    }


def test_key_depends_on_how_graphs_are_compiled_and_on_nothing_else_of_torch_private() -> None:
    assert relative(torch_private.inductor.SOURCES) == {
        "compiled_ddp/torch_private/inductor.py",
        "compiled_ddp/torch_private/packing.py",
    }

"""`import compiled_ddp` and the command's help do without torch; what is asked for comes then, by whatever way."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

import compiled_ddp
from compiled_ddp import public

WITHOUT_TORCH = "assert not any(name.partition('.')[0] == 'torch' for name in sys.modules), 'torch was imported'"


def run(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_is_imported_without_torch() -> None:
    assert run(f"import compiled_ddp\n{WITHOUT_TORCH}\nprint(compiled_ddp.__version__)").strip() == "0.1.0"


@pytest.mark.parametrize("arguments", [["--help"], ["compare", "--help"], ["verify", "--help"], ["compare", "a.py"]])
def test_help_and_refused_arguments_do_without_torch(arguments: list[str]) -> None:
    code = f"""
from compiled_ddp.__main__ import main
try:
    main({arguments})
except SystemExit as end:
    print(end.code)
{WITHOUT_TORCH}"""
    assert run(code).splitlines()[-1] == ("0" if "--help" in arguments else "2")


def test_the_console_script_is_the_module() -> None:
    (script,) = entry_points(group="console_scripts", name="compiled-ddp")
    assert script.value == "compiled_ddp.__main__:main"


def test_public_names_are_there_and_nothing_else_is() -> None:
    for name in public.__all__:
        assert getattr(compiled_ddp, name) is getattr(public, name)
    assert set(dir(compiled_ddp)) == {"__version__", "comm_hooks", *public.__all__}
    for name in ("nothing", "_nothing", "compile_dpp"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(compiled_ddp, name)


def test_a_module_can_be_reached_before_it_was_imported() -> None:
    code = "import compiled_ddp\nprint(compiled_ddp.comm_hooks.__name__, 'compiled_ddp.public' in sys.modules)"
    assert run(code).split() == ["compiled_ddp.comm_hooks", "False"]


STAR = "from compiled_ddp import *\nprint(EagerDDP.__module__, functional.grad.__module__)"
FIRST_WAYS = {
    "a wrapper": "from compiled_ddp.eager import EagerDDP",
    "compile_ddp": "from compiled_ddp.compiled import compile_ddp",
    "functional": "import compiled_ddp.functional",
    "apex": "from compiled_ddp.compat.apex import DistributedDataParallel",
    "torch's class": "from compiled_ddp.integrations.torch import DistributedDataParallel",
    "everything": STAR,
}


@pytest.mark.slow
@pytest.mark.parametrize("way", FIRST_WAYS)
def test_whatever_is_imported_first_registers_the_operators_and_stays_out_of_traces(way: str) -> None:
    check = "import torch\nfrom compiled_ddp import torch_private\nprint(hasattr(torch.ops.compiled_ddp, 'pack'))"
    assert run(f"{FIRST_WAYS[way]}\n{check}\nimport compiled_ddp\ncompiled_ddp.compile_ddp").split()[-1] == "True"


def test_no_thread_is_the_first_to_look_at_unnamed_nodes() -> None:
    """Two threads that do so at once wait for each other: the note in compiled_ddp/torch_private/autograd.py."""
    code = """
import torch
def is_made():
    return any(kind.__name__ == "CppFunction" for kind in object.__subclasses__())
print(is_made())
with torch.device("meta"), torch.inference_mode():
    import compiled_ddp.torch_private
print(is_made())"""
    assert run(code).split() == ["False", "True"]

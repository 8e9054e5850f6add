"""What imports what, how long a function is, and that an import only defines."""
import ast
import subprocess
import sys

import pytest
from helpers import ENV, ROOT


def module_name(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


FILES = [*ROOT.glob("*.py"), *ROOT.glob("runtime/*.py")]
TREES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
MODULES = {name for name in TREES if not name.endswith("__init__")}


def imports(name):
    """The modules of this project that a module imports, inside its functions, too."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from runtime import plots` imports a module, `from model import GPT` a class of one.
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found & MODULES


IMPORT_EVERYTHING = """
import importlib, socket, sys

def refuse(*args, **kwargs):
    raise AssertionError(args)

socket.getaddrinfo = refuse
root, *names = sys.argv[1:]
sys.path.insert(0, root)
late = {"matplotlib", "wandb", "datasets", "transformers", "pyarrow", "gigatoken", "torch._dynamo"}

importlib.import_module("fineweb")
assert "presets" in sys.modules and "torch" not in sys.modules
for name in sys.modules.keys() & {*names}:
    del sys.modules[name]
importlib.import_module("model")
with open("../loaded_by_model", "w") as file:
    print(*sys.modules, file=file)
for name in names:
    importlib.import_module(name)
    assert not late & sys.modules.keys(), name
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A process that has imported everything, in a folder of its own, beside `loaded_by_model`.

    (its result, the folder). The process of the tests has imported more.
    """
    folder = tmp_path_factory.mktemp("imported") / "empty"
    folder.mkdir()
    command = [sys.executable, "-c", IMPORT_EVERYTHING, ROOT, *sorted(MODULES)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=ENV)
    return result, folder


def test_runtime_imports_no_script():
    modules_of_runtime = {name for name in MODULES if name.startswith("runtime.")}

    assert len(modules_of_runtime) > 10
    for name in modules_of_runtime:
        assert imports(name) <= modules_of_runtime, name


def test_no_module_of_runtime_asks_for_a_recipe_by_its_name():
    for name in MODULES:
        if name.startswith("runtime."):
            constants = {node.value for node in ast.walk(TREES[name])
                         if isinstance(node, ast.Constant)}
            assert not constants & {"speedrun", "frontier"}, name


def test_nothing_imports_bench():
    for name in MODULES:
        assert "bench" not in imports(name), name


def test_nothing_imports_in_a_circle():
    remaining = {name: imports(name) for name in MODULES}
    while remaining:
        leaves = {name for name, used in remaining.items() if not used & remaining.keys()}
        assert leaves, f"a circle among {sorted(remaining)}"
        for name in leaves:
            del remaining[name]


def test_the_model_needs_at_most_five_files_and_not_the_recipes(imported):
    result, folder = imported
    assert result.returncode == 0, result.stderr

    loaded = MODULES & set((folder.parent / "loaded_by_model").read_text().split())

    assert "model" in loaded
    assert len(loaded) <= 5, loaded
    assert not imports("model") & {"recipes", "export"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_function_fits_on_a_screen(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 45, node.name


def test_each_script_ends_as_a_command():
    """So a mistake is one line and an exit code. The tests fork most scripts without their end."""
    scripts = set()
    for name, tree in TREES.items():
        if ast.unparse(tree.body[-1:]) == "if __name__ == '__main__':\n    run_command(main)":
            scripts.add(name)
    assert scripts == {"bench", "check", "export", "fineweb", "hellaswag", "sample", "train_gpt2"}


def test_an_import_only_defines(imported):
    """It prints, writes and downloads nothing, and imports no optional package and no compiler.

    fineweb.py, which reads the presets, does not even import torch.
    """
    result, folder = imported
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(folder.iterdir())

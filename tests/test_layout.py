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


def run_python(code, **options):
    """A process of its own, because this one has imported more."""
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENV, **options)


def test_runtime_imports_no_script():
    modules_of_runtime = {name for name in MODULES if name.startswith("runtime.")}
    assert len(modules_of_runtime) > 10
    for name in modules_of_runtime:
        assert imports(name) <= modules_of_runtime, name


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


def test_the_model_needs_at_most_five_files_and_not_the_recipes():
    result = run_python("import model\nprint(*sys.modules)")
    loaded = MODULES & set(result.stdout.split())
    assert "model" in loaded, result.stderr
    assert len(loaded) <= 5, loaded
    assert not imports("model") & {"recipes", "export"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_function_fits_on_a_screen(name):
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 45, node.name


IMPORT_EVERYTHING = """
import importlib, socket

def refuse(*args, **kwargs):
    raise AssertionError(args)

socket.getaddrinfo = refuse
optional = {"matplotlib", "wandb", "datasets", "transformers", "pyarrow", "gigatoken"}
for name in NAMES:
    importlib.import_module(name)
    assert not optional & sys.modules.keys(), name
"""


def test_an_import_only_defines(tmp_path):
    """It prints, writes and downloads nothing, and imports no optional package."""
    code = IMPORT_EVERYTHING.replace("NAMES", repr(sorted(MODULES)))
    result = run_python(code, cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())

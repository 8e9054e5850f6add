"""The floors of the house: what imports what, and that an import only defines."""
import ast
import subprocess
import sys

import pytest
from helpers import ENV, ROOT

SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
           for path in (*ROOT.glob("*.py"), *ROOT.glob("[br]*/*.py"))}
SCRIPTS = {name for name in SOURCES if "." not in name}
MODULES = {name for name in SOURCES if not name.endswith(".__init__")}

# model.py's load_model and its command `export`, which import these inside a function: GPT-2 itself needs
# neither of them.
DOORS = {"model": {"recipes", "export"}}


def imports(name):
    """The modules of this project that a module imports, inside its functions too."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES


def test_imports_go_down_only():
    """Scripts import the packages; benchmarks import all but bench.py, and only it imports them."""
    assert len(SCRIPTS) >= 6 and len(SOURCES) > 20
    packages = {"runtime": {"runtime"}, "benchmarks": {"benchmarks", "runtime", *SCRIPTS} - {"bench"}}
    for name in SOURCES.keys() - SCRIPTS:
        package = name.partition(".")[0]
        assert {found.partition(".")[0] for found in imports(name)} <= packages[package], name
        assert not name.endswith("__init__") or SOURCES[name] == ""
    for name in SCRIPTS:
        assert not {"benchmarks", "bench"} & {found.partition(".")[0] for found in imports(name)} or (
            name == "bench"), name


def test_nothing_imports_in_a_circle():
    remaining = {name: imports(name) - DOORS.get(name, set()) for name in MODULES}
    while remaining:
        leaves = {name for name, used in remaining.items() if not used & remaining.keys()}
        assert leaves, f"a circle among {sorted(remaining)}"
        remaining = {name: used for name, used in remaining.items() if name not in leaves}


def test_gpt2_can_be_imported_without_what_loads_exports_or_trains_it():
    """`import model` loads at most five files of the project. A process of its own, as tests import more."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import model; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    loaded = MODULES & set(result.stdout.split())
    assert "model" in loaded and len(loaded) <= 5, result.stderr or loaded


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_function_fits_on_a_screen(name):
    for node in ast.walk(ast.parse(SOURCES[name])):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 45, node.name


def test_an_import_only_defines(tmp_path):
    """It prints, writes and downloads nothing, and what is optional is imported where it is used."""
    code = f"""
import importlib, socket, sys
sys.path.insert(0, {str(ROOT)!r})
def refuse(*args, **kwargs):
    raise AssertionError(args)
socket.getaddrinfo = refuse
for name in {sorted(MODULES)!r}:
    importlib.import_module(name)
    late = {{"matplotlib", "wandb", "datasets", "transformers", "pyarrow", "gigatoken"}} & sys.modules.keys()
    assert not late, (name, late)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
                            env=ENV)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())

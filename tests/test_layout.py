"""The floors of the house: what imports what, and how long a file and a function may be."""
import ast

import pytest
from helpers import ROOT

SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
           for path in (*ROOT.glob("*.py"), *ROOT.glob("[bcr]*/*.py"))}
SCRIPTS = {name for name in SOURCES if "." not in name}


def imports(name):
    """The modules of this project that a module imports, inside its functions too."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & SOURCES.keys()


def test_imports_go_down_only():
    """Scripts import the packages; corpus imports runtime; benchmarks import all but bench.py, and only it
    imports them."""
    assert len(SCRIPTS) >= 6 and len(SOURCES) > 20
    packages = {"runtime": {"runtime"}, "corpus": {"corpus", "runtime"},
                "benchmarks": {"benchmarks", "corpus", "runtime", *SCRIPTS} - {"bench"}}
    for name in SOURCES.keys() - SCRIPTS:
        package = name.partition(".")[0]
        assert {found.partition(".")[0] for found in imports(name)} <= packages[package], name
        assert not name.endswith("__init__") or SOURCES[name] == ""
    for name in SCRIPTS - {"bench"}:
        assert not any(found.startswith("benchmarks") for found in imports(name)), name


def test_nothing_imports_in_a_circle():
    remaining = {name: imports(name) for name in SOURCES}
    while remaining:
        leaves = {name for name, needed in remaining.items() if not needed & remaining.keys()}
        assert leaves, f"a circle among {sorted(remaining)}"
        remaining = {name: needed for name, needed in remaining.items() if name not in leaves}


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_a_file_is_read_in_one_sitting(name):
    source = SOURCES[name]
    assert source.count("\n") <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 45, node.name


def test_train_gpt2_begins_with_the_recipes_and_ends_with_the_loop():
    lines = SOURCES["train_gpt2"].splitlines()
    assert lines.index("RECIPES = {") < 150
    assert len(lines) - next(i for i, line in enumerate(lines) if line.startswith("def loop(")) <= 120

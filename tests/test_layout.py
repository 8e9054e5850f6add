"""The floors of the house: what imports what, how much there is, and that an import only defines."""
import ast
import subprocess
import sys

import pytest
from helpers import ENV, ROOT

SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
           for path in (*ROOT.glob("*.py"), *ROOT.glob("[br]*/*.py"))}
SCRIPTS = {name for name in SOURCES if "." not in name}
MODULES = {name for name in SOURCES if not name.endswith(".__init__")}


def in_package(package):
    return {name for name in MODULES if name.startswith(f"{package}.")}


def lines(names):
    return sum(SOURCES[name].count("\n") for name in names)


def lines_in(*patterns):
    return sum(path.read_text(encoding="utf-8").count("\n") for pattern in patterns
               for path in ROOT.glob(pattern) if path.is_file())


def imports(name):
    """The modules of this project that a module imports, inside its functions too."""
    found = set()
    for node in ast.walk(ast.parse(SOURCES[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & MODULES


def needed(*names):
    """These modules and all of this project that they import, directly or not."""
    found, new = set(), set(names)
    while new:
        found |= new
        new = set().union(*map(imports, new)) - found
    return found


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
    remaining = {name: imports(name) for name in MODULES}
    while remaining:
        leaves = {name for name, used in remaining.items() if not used & remaining.keys()}
        assert leaves, f"a circle among {sorted(remaining)}"
        remaining = {name: used for name, used in remaining.items() if name not in leaves}


def nodes(names):
    """AST nodes: the content of the code, which no squeezing of lines makes less."""
    return sum(not isinstance(node, ast.expr_context) for name in names
               for node in ast.walk(ast.parse(SOURCES[name])))


def test_what_a_person_reads_stays_small():
    """By content, not by lines. Sums, so that no file is squeezed at another's cost."""
    runtime, training = in_package("runtime"), needed("train_gpt2")
    sums = {
        "modules of runtime": (len(runtime), 18),
        "runtime": (nodes(runtime), 17_500),
        "the scripts": (nodes(SCRIPTS), 12_000),
        "files that train_gpt2.py imports": (len(training), 23),
        "what train_gpt2.py imports": (nodes(training), 24_000),
        "what model.py needs": (lines({"model", "runtime.language_model", "runtime.kernels"}), 600),
        "benchmarks": (nodes(in_package("benchmarks")), 8_000),
        "tests": (lines_in("tests/*.py"), 6100),
        "the stand-in GPU": (lines_in("tests/null_gpu/*"), 900)}
    assert not {what: (n, most) for what, (n, most) in sums.items() if n > most}


def test_model_py_stands_alone():
    """GPT-2 can be read, and imported, without what loads, exports, benchmarks or trains it."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import model
print(*sorted(name for name in sys.modules if name in {MODULES!r}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV)
    assert result.stdout.split() == ["model", "runtime.cli", "runtime.kernels", "runtime.language_model",
                                     "runtime.tokenizer"], result.stderr


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

"""The tests import the scripts from the folder above, never from the network, and never from a cache of a hub."""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["HF_HUB_OFFLINE"] = "1"
# one thread a process: the tests run side by side (pytest-xdist), and torch's threads would wait for each other
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_terminal_summary(terminalreporter, config):
    if "check_*.py" not in config.getini("python_files"):
        terminalreporter.write_line("GPU paths are checked apart, and without a GPU: tests/null_gpu/check (CONTRIBUTING.md)")

"""`bench.py operators`: which operators the time of a step on a CPU goes to."""
import time
from collections import Counter
from dataclasses import replace

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.timing import measure, median_ms, print_table, time_steps
from runtime.cli import UserError

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


class OperatorTimer(TorchDispatchMode):
    """with OperatorTimer() as timer: ...; timer.seconds and timer.calls of each ATen operator on a CPU."""

    def __init__(self):
        super().__init__()
        self.seconds, self.calls = Counter(), Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        start, name = time.perf_counter(), function._schema.name.removeprefix("aten::")
        result = function(*args, **(kwargs or {}))
        self.seconds[name] += time.perf_counter() - start
        self.calls[name] += 1
        return result


def operator_seconds(step, s):
    """{"operators": [(name, calls a step, seconds a step)], "seconds": [of each step, without the timer]}."""
    seconds = time_steps(step, s)[1]
    with OperatorTimer() as timer:
        for _ in range(s.warmup):               # the timer's first steps take longer
            step()
        timer.seconds.clear()
        timer.calls.clear()
        for _ in range(s.steps):
            step()
    return {"operators": [(name, timer.calls[name] / s.steps, total / s.steps)
                          for name, total in timer.seconds.most_common()], "seconds": seconds}


def operators_table(args, base):
    """Which operators a step's time goes to."""
    if base.device != "cpu":
        raise UserError("bench.py operators is for a CPU (--device cpu): a GPU's operators are in the trace "
                        "of train_gpt2.py --profile")
    result, = measure([replace(base, what="operators", compile=False)], 1)
    if "failed" in result:
        raise UserError(f"bench.py operators: {result['failed']}")
    total = sum(seconds for *_, seconds in result["operators"])
    rows = [{"operator": "matrix products (mm, addmm, bmm)",
             "calls": round(sum(n for name, n, _ in result["operators"] if name in PRODUCTS)),
             "ms": 1e3 * sum(seconds for name, _, seconds in result["operators"] if name in PRODUCTS)}]
    others = [entry for entry in result["operators"] if entry[0] not in PRODUCTS]
    rows += [{"operator": name, "calls": round(n), "ms": 1e3 * seconds} for name, n, seconds in others[:16]]
    rows.append({"operator": "others", "calls": round(sum(n for _, n, _ in others[16:])),
                 "ms": 1e3 * sum(seconds for *_, seconds in others[16:])})
    print_table([row | {"share": f"{row['ms'] / total / 1e3:.1%}"} for row in rows])
    print(f"{1e3 * total:,.0f} ms in operators; a step takes {median_ms(result):,.0f} ms without the timer")
    return rows

"""The size budget: measured over the packages without the generated stubs, printed, and held.

`pytest tests/unit/test_budget.py -s` shows the table. Lines are lines of the file, comments and blank ones included;
a function's length goes from its `def` to its last line, docstring included, decorators not.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pdserve", "engine", "transport", "router", "prefill_worker", "decode_worker", "cluster")
CORE = ("prefill_worker", "decode_worker", "transport", "router/pipeline.py")

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
MAX_ARGUMENTS = 6  # self and cls not counted
MAX_MEDIAN_FUNCTION_LINES = 9
AIM_CORE_LINES = 2500


@dataclass(frozen=True)
class Function:
    """One `def`, nested ones and methods included."""

    where: str
    num_lines: int
    num_arguments: int


@dataclass(frozen=True)
class Source:
    """One measured file; `path` is relative to the repository."""

    path: str
    num_lines: int
    functions: tuple[Function, ...]

    def belongs_to(self, folder_or_file: str) -> bool:
        return self.path == folder_or_file or self.path.startswith(folder_or_file + "/")


def test_files_are_short() -> None:
    too_long = [f"{file.path}: {file.num_lines} lines" for file in sources() if file.num_lines > MAX_FILE_LINES]
    assert too_long == []


def test_functions_are_short() -> None:
    too_long = [f"{f.where}: {f.num_lines} lines" for f in functions(sources()) if f.num_lines > MAX_FUNCTION_LINES]
    assert too_long == []


def test_functions_take_few_arguments() -> None:
    too_many = [f"{f.where}: {f.num_arguments}" for f in functions(sources()) if f.num_arguments > MAX_ARGUMENTS]
    assert too_many == []


def test_the_median_function_is_small() -> None:
    files = sources()
    print("\n" + table(files))
    assert median(f.num_lines for f in functions(files)) <= MAX_MEDIAN_FUNCTION_LINES


def test_the_ruler_measures() -> None:
    text = "class A:\n    @staticmethod\n    def f(self, a, *b, c=1, **d):\n        def g(): pass\n        return g\n"
    (f, g) = measure("x.py", text).functions
    assert (f.where, f.num_lines, f.num_arguments) == ("x.py:3 f", 3, 4)
    assert (g.where, g.num_lines, g.num_arguments) == ("x.py:4 g", 1, 0)


def sources() -> list[Source]:
    """All files of the packages, generated ones left out."""
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    written = (path for path in paths if not path.stem.endswith(("_pb2", "_pb2_grpc")))
    return [measure(str(path.relative_to(ROOT)), path.read_text()) for path in written]


def measure(path: str, text: str) -> Source:
    nodes = ast.walk(ast.parse(text))
    defs = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Source(path, len(text.splitlines()), tuple(measure_function(path, node) for node in defs))


def measure_function(path: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
    num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
    return Function(f"{path}:{node.lineno} {node.name}", num_lines, len(list(arguments(node.args))))


def arguments(args: ast.arguments) -> Iterator[ast.arg]:
    named = (*args.posonlyargs, *args.args, *args.kwonlyargs)
    yield from (arg for arg in named if arg.arg not in ("self", "cls"))
    yield from (arg for arg in (args.vararg, args.kwarg) if arg is not None)


def functions(files: list[Source]) -> list[Function]:
    return [function for file in files for function in file.functions]


def table(files: list[Source]) -> str:
    """Lines, files and median function of every package, and of the core."""
    rows = [row(package, [f for f in files if f.belongs_to(package)]) for package in PACKAGES]
    core = [f for f in files if any(f.belongs_to(part) for part in CORE)]
    head = f"{'':<16}{'lines':>7}{'files':>7}{'functions':>11}{'median':>8}{'longest file':>14}"
    return "\n".join([head, *rows, row("all", files), row("core", core) + f"   (aim: {AIM_CORE_LINES} lines)"])


def row(name: str, files: list[Source]) -> str:
    lengths = [f.num_lines for f in functions(files)]
    longest = max((file.num_lines for file in files), default=0)
    num_lines = sum(file.num_lines for file in files)
    return f"{name:<16}{num_lines:>7}{len(files):>7}{len(lengths):>11}{median(lengths or [0]):>8g}{longest:>14}"

"""mutmut, which also changes functions behind `@asynccontextmanager` and `@property`: `python -m scripts.mutants run`.

By itself it leaves out every decorated function, and with them `Dispatcher.admit`, `DecodeClient.reserve` and whatever
else owns something for the time of a block. Here the copies that it makes of such a function bear no decorator; the one
that chooses among them does. `[tool.mutmut]` in pyproject.toml says what is changed, and which tests must notice.
"""

from collections.abc import Iterable
from typing import Any

import libcst as cst
from mutmut.__main__ import cli
from mutmut.mutation import file_mutation

DECORATORS = ("asynccontextmanager", "property")

_skip = file_mutation.MutationVisitor._skip_node_and_children
_arrange = file_mutation.function_trampoline_arrangement


def is_ours(node: cst.CSTNode) -> bool:
    """Whether mutmut is to change this function in spite of its decorator."""
    if not isinstance(node, cst.FunctionDef) or len(node.decorators) != 1:
        return False
    decorator = node.decorators[0].decorator
    return isinstance(decorator, cst.Name) and decorator.value in DECORATORS


def skip(visitor: file_mutation.MutationVisitor, node: cst.CSTNode) -> bool:
    """In place of mutmut's own."""
    return not is_ours(node) and _skip(visitor, node)


def arrange(function: cst.FunctionDef, mutants: Iterable[file_mutation.Mutation], class_name: str | None) -> Any:
    """In place of mutmut's own."""
    if not is_ours(function):
        return _arrange(function, mutants, class_name)
    declared, (chooser, *copies), assigned, names = _arrange(function.with_changes(decorators=[]), mutants, class_name)
    assert isinstance(chooser, cst.FunctionDef)
    chooser = chooser.with_changes(decorators=[*function.decorators, *chooser.decorators])
    return declared, [chooser, *copies], assigned, names


def main() -> None:
    """The command line is mutmut's."""
    file_mutation.MutationVisitor._skip_node_and_children = skip  # type: ignore[assignment,method-assign]
    file_mutation.function_trampoline_arrangement = arrange
    cli()


if __name__ == "__main__":
    main()

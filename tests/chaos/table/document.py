"""Tables in a document: each stands between two marks, everything around them is a person's."""

from pathlib import Path


def update(path: Path, name: str, table: str, command: str = "make chaos") -> None:
    """Put the table between the marks of its name. Raises ValueError where they are missing."""
    begin, end = f"<!-- {name}: made by {command} -->\n", f"<!-- {name}: end -->"
    before, found, rest = path.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"{path}: expected the lines {begin.strip()} and {end}")
    path.write_text(f"{before}{begin}\n{table}\n{end}{after}")

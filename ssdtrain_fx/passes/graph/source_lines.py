"""The line of user code that a node comes from."""

from __future__ import annotations

from torch import fx


def source_line(node: fx.Node) -> str:
    """``file.py:12 code`` of the innermost frame of user code, or an empty string."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").strip().splitlines()]
    for idx in range(len(lines) - 1, -1, -1):
        if lines[idx].startswith("File "):
            path, number = lines[idx].split('"')[1], lines[idx].split("line ")[1].split(",")[0]
            code = lines[idx + 1] if idx + 1 < len(lines) else ""
            return f"{path.rsplit('/', 1)[-1]}:{number} {code}".strip()
    return ""

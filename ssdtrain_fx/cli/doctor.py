"""``ssdtrain-fx doctor``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ssdtrain_fx.cli.common import EXIT_PROBLEM, JsonTarget
from ssdtrain_fx.doctor.examine import Finding, examine

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    ssd_dirs: Annotated[
        list[str] | None,
        typer.Option("--ssd-dir", help="Directory on the SSD. Default: $SSDTRAIN_DIR, else the temporary directory."),
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, help="Seconds to wait for the answer of a check.")
    ] = 2.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the findings to this file; - prints them.")
    ] = None,
) -> None:
    """Check whether this machine and the directory for spill files are suitable for offloading, and what to change.

    Example: ssdtrain-fx doctor --ssd-dir /mnt/nvme0

    Takes seconds and changes nothing. Attach the output of `--json -` to bug reports.

    Exit code: 0 no problems (warnings are possible), 1 at least one problem, 2 wrong usage.
    """
    target = JsonTarget(json_path)
    with target.console.status("checking"):
        findings = examine(ssd_dirs or [], timeout_s=timeout_s)
    target.console.print(_render(findings))
    counts = {status: sum(finding.status == status for finding in findings) for status in STYLES}
    target.console.print(f"{counts['problem']} problems, {counts['warning']} warnings", highlight=False)
    target.write(json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings], **counts}, indent=2))
    if counts["problem"]:
        raise typer.Exit(EXIT_PROBLEM)


def _render(findings: list[Finding]) -> Table:
    table = Table("", "", "found, and what to change", title="ssdtrain-fx doctor")
    table.columns[2].overflow = "fold"
    for finding in findings:
        style = STYLES[finding.status]
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n-> {finding.advice}", style="" if finding.status == "ok" else style)
        table.add_row(Text(finding.status, style=style), finding.name, text)
    return table

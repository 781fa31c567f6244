"""What the commands share: the terminal, progress, tasks that Ctrl-C ends, and files and exit statuses at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from loss_bench import files, report
from loss_bench.processes import AnyTask, Done, Result, Work, run_here, run_tasks
from loss_bench.results import Report

INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""

_PLAIN_WIDTH = 180


def make_console(*, stderr: bool = False) -> Console:
    """The terminal, or something wide enough for the tables."""
    console = Console(stderr=stderr)
    # A pipe has no width; tables cut to 80 columns would lose what they say.
    return console if console.is_terminal else Console(stderr=stderr, width=_PLAIN_WIDTH)


def mistake(message: object) -> typer.Exit:
    """Print what was wrong with the command; what to raise for exit status 2."""
    make_console(stderr=True).print(f"[red]error:[/] {escape(str(message))}", highlight=False)
    return typer.Exit(2)


def command_line() -> list[str]:
    """The words of the command."""
    return ["loss-bench", *sys.argv[1:]]


@contextmanager
def show_progress(quiet: bool) -> Iterator[Any]:
    """Yields the function that a run tells of its steps."""
    console = make_console(stderr=True)
    if quiet:
        yield lambda text, share: None
    elif not console.is_terminal:
        begin = time.monotonic()
        yield lambda text, share: print(
            f"{time.monotonic() - begin:6.1f} s {share:4.0%} {text}", file=sys.stderr, flush=True
        )
    else:
        columns = (SpinnerColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=1.0)
            yield lambda text, share: bar.update(task, completed=share, description=text)


@dataclass(frozen=True)
class Isolation:
    """How tasks are kept from one another: in how many processes (none: in this one), silent for how long."""

    jobs: int | None
    time_limit_s: float


def run_all(
    work: Work[AnyTask, Result],
    tasks: Sequence[AnyTask],
    device: torch.device,
    isolation: Isolation,
    quiet: bool,
    after_each: Callable[[Done[AnyTask, Result]], None],
) -> bool:
    """Run `tasks` and hand over what became of each; whether Ctrl-C came in between."""
    done = 0
    with show_progress(quiet) as step:

        def tell(task: AnyTask, text: str, share: float) -> None:
            step(text, (done + share) / len(tasks))

        jobs, limit = isolation.jobs, isolation.time_limit_s
        outcomes = (
            run_tasks(work, tasks, device, jobs=jobs, time_limit_s=limit, tell=tell)
            if jobs is not None
            else run_here(work, tasks, device, tell=tell)
        )
        with closing(outcomes):
            try:
                for outcome in outcomes:
                    done += 1
                    problem = ": ".join(outcome.failure) if outcome.failure else f"{outcome.seconds:.1f} s"
                    step(f"{outcome.task}: {problem}", done / len(tasks))
                    after_each(outcome)
            except KeyboardInterrupt:
                make_console(stderr=True).print("interrupted; what was finished follows")
                return True
    return False


def deliver(found: Report, json_file: Path | None, markdown: Path | None, *, interrupted: bool) -> None:
    """Write and print what was found, and set the exit status by it."""
    found.command = command_line()
    # Files first: whoever reads the tables may leave before their end, and that ends this process.
    if json_file is not None:
        found.write(json_file)
    if markdown is not None:
        files.write(markdown, report.to_markdown(found))
    report.print_report(found, make_console())
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if found.has_wrong:
        raise typer.Exit(1)

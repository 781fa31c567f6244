"""The command ``loss-bench``."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.table import Table

from loss_bench import __version__, accuracy, cases, compiling, files, report
from loss_bench.accuracy import KINDS, Accuracy, AccuracyTask, earlier_errors, errors_json, new_accuracy
from loss_bench.calls import BackendRow, check_installed, find_backends
from loss_bench.cases import Options
from loss_bench.choices import (
    BackendOption,
    BiasOption,
    DeviceOption,
    DtypeOption,
    HiddenOption,
    InplaceOption,
    InProcessOption,
    JobsOption,
    JsonOption,
    MarkdownOption,
    OpsArgument,
    PresetOption,
    QuietOption,
    ReductionOption,
    ResumeOption,
    RowsOption,
    ShapeOption,
    SizeWords,
    SmoothingOption,
    SoftcapOption,
    TimeLimitOption,
    VocabOption,
    WeightOption,
    ZLossOption,
    check_choice,
    check_writable,
    choose_cases,
    choose_device,
)
from loss_bench.compare import compare, comparison_table
from loss_bench.compiling import CompileTask
from loss_bench.inputs import read_logits
from loss_bench.processes import (
    Done,
    default_jobs,
    one_triton_cache,
)
from loss_bench.results import Report, device_name, environment, merge, read_report, schema_text
from loss_bench.runner import CaseRunner, Plan, chosen_backends
from loss_bench.session import Executor, Session
from loss_bench.terminal import (
    INTERRUPTED,
    Isolation,
    command_line,
    deliver,
    make_console,
    mistake,
    run_all,
    show_progress,
)
from loss_bench.tokens import digest, encode, read_text
from loss_bench.train import (
    SIZES,
    Curve,
    TrainTask,
    check_length,
    compare_curves,
    curves_json,
    earlier_curves,
    failed_curve,
)
from loss_bench.train import Size as TrainSize
from loss_bench.train import train as train_with
from loss_bench.worker import Worker

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Compare the loss implementations that are installed: time, memory and error in one row.\n\n"
    "[bold]loss-bench run[/] alone compares everything on this machine. Results are checked against float64 before "
    "they are timed; the exit status is 1 if one was wrong.",
)

# A causal loss is a cross-entropy with shifted labels: the same errors.
_ACCURACY_OPS = ("cross_entropy", "softmax", "log_softmax")
_BUDGET_MS = {"cuda": 300.0, "cpu": 150.0}


def main() -> None:
    """Entry point of the console script."""
    one_triton_cache()
    # A scheduler ends a job with SIGTERM, and a shell lets what it starts in the background ignore SIGINT: both are to
    # keep what is finished.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"loss-bench {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


@app.command("list")
def list_command(device: DeviceOption = None) -> None:
    """Show every backend, what it provides, and why it cannot run here."""
    try:
        where = choose_device(device)
    except (ValueError, RuntimeError) as error:
        raise mistake(error) from error
    table = Table("backend", "distribution", "version", "ops", f"on {where}")
    for backend in find_backends(where):
        state = "[green]available[/]" if backend.available else f"[yellow]{escape(backend.reason)}[/]"
        table.add_row(backend.name, backend.distribution, backend.version, ", ".join(backend.ops), state)
    make_console().print(table)


@app.command()
def run(
    ops: OpsArgument = None,
    backend: BackendOption = None,
    shape: ShapeOption = None,
    vocab: VocabOption = None,
    rows: RowsOption = None,
    hidden: HiddenOption = None,
    dtype: DtypeOption = None,
    preset: PresetOption = None,
    passes: Annotated[
        list[str] | None, typer.Option("--pass", help=f"{', '.join(cases.PASSES)}; default: all.")
    ] = None,
    reduction: ReductionOption = "mean",
    label_smoothing: SmoothingOption = 0.0,
    z_loss: ZLossOption = 0.0,
    softcap: SoftcapOption = None,
    weight: WeightOption = False,
    bias: BiasOption = False,
    ignored: Annotated[float, typer.Option(min=0.0, max=0.999, help="Share of rows with an ignored target.")] = 0.0,
    inplace: InplaceOption = False,
    logits: Annotated[
        Path | None,
        typer.Option(
            "--logits",
            help="safetensors file with logits and labels, in place of random ones.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    iters: Annotated[
        int | None, typer.Option(min=1, help="Timed iterations; default: as many as fit a third of a second.")
    ] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Iterations before them.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json_file: JsonOption = None,
    markdown: MarkdownOption = None,
    graph: Annotated[
        bool, typer.Option("--graph/--no-graph", help="On a GPU, time CUDA graphs of the passes as well.")
    ] = True,
    resume: ResumeOption = None,
    time_limit: TimeLimitOption = 300.0,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget", min=1.0, help="Seconds for the whole run: fewer iterations where it takes that, all checks."
        ),
    ] = None,
    in_process: InProcessOption = False,
    device: DeviceOption = None,
    quiet: QuietOption = False,
) -> None:
    """Check and time backends on the same inputs.

    For example:

      loss-bench run

      loss-bench run cross_entropy --vocab llama3,qwen3 --rows 4096,8192 --dtype bf16 --json results.json

      loss-bench run softmax log_softmax --shape 4096x16384 --dtype fp16 --backend torch-nn,triton

      loss-bench run linear_cross_entropy --shape 8192x4096x128256
    """
    deadline = time.monotonic() + budget if budget is not None else None
    try:
        where = choose_device(device)
        real = read_logits(logits) if logits else None
        file = logits.name if logits else ""
        options = Options(reduction, label_smoothing, z_loss, softcap, weight, ignored, inplace, file, bias)
        chosen = choose_cases(where, ops, SizeWords(shape, vocab, rows, hidden, dtype, preset), options, real)
        chosen_passes = cases.words(passes) or list(cases.PASSES)
        for name in chosen_passes:
            check_choice("pass", name, cases.PASSES)
        backends = cases.words(backend)
        earlier = read_report(resume) if resume else None
        check_writable(json_file, markdown)
    except (ValueError, RuntimeError) as error:
        raise mistake(error) from error
    plan = Plan(tuple(backends), tuple(chosen_passes), iters, warmup, _BUDGET_MS[where.type], seed, logits, graph)
    with show_progress(quiet) as step:
        found, interrupted = _run(
            plan, where, chosen, step, json_file, earlier, preset, None if in_process else time_limit, deadline
        )
    found.settings |= {"preset": preset, "budget_s": budget}
    deliver(found, json_file, markdown, interrupted=interrupted)


def _run(
    plan: Plan,
    device: torch.device,
    chosen: list[cases.Case],
    step: Callable[[str, float], None],
    json_file: Path | None,
    earlier: Report | None,
    preset: str | None,
    time_limit: float | None,
    deadline: float | None,
) -> tuple[Report, bool]:
    """The report of a run, of its finished cases if it is interrupted (and whether); written after each of them."""
    done = 0

    def announce(text: str, backend: str | None) -> None:
        step(text, done / len(chosen))

    def after_case(count: int, found: Report) -> None:
        nonlocal done
        done = count
        if json_file is not None:
            found.settings["preset"] = preset
            found.command = command_line()
            found.write(json_file)

    try:
        executor = _executor(plan, device, announce, time_limit)
    except (ValueError, RuntimeError) as error:
        raise mistake(error) from error
    try:
        session = Session(executor, plan, chosen, earlier=earlier, after_case=after_case, deadline=deadline)
        session.run()
    except ValueError as error:
        raise mistake(error) from error
    except KeyboardInterrupt:
        make_console(stderr=True).print("interrupted; what was measured follows")
        return session.report, True
    finally:
        executor.close()
    return session.report, False


def _executor(
    plan: Plan, device: torch.device, announce: Callable[[str, str | None], None], time_limit: float | None
) -> Executor:
    if time_limit is None:
        return CaseRunner(plan, device, announce)
    return Worker(plan, device, announce, time_limit_s=time_limit)


@app.command()
def warm(
    ops: OpsArgument = None,
    backend: BackendOption = None,
    shape: ShapeOption = None,
    vocab: VocabOption = None,
    rows: RowsOption = None,
    hidden: HiddenOption = None,
    dtype: DtypeOption = None,
    preset: PresetOption = None,
    reduction: ReductionOption = "mean",
    label_smoothing: SmoothingOption = 0.0,
    z_loss: ZLossOption = 0.0,
    softcap: SoftcapOption = None,
    weight: WeightOption = False,
    bias: BiasOption = False,
    inplace: InplaceOption = False,
    jobs: JobsOption = None,
    time_limit: TimeLimitOption = 120.0,
    device: DeviceOption = None,
    quiet: QuietOption = False,
) -> None:
    """Compile every kernel of a run ahead of time, in several processes, into the compilers' caches on disk.

    Takes those arguments of [bold]run[/] that decide what is compiled. Nothing is timed. What fails here fails again in
    the run; it is named at the end and makes the exit status 1. A backend that refuses a case does not.

    For example:

      loss-bench warm --preset llm --jobs 8; loss-bench run --preset llm
    """
    try:
        where = choose_device(device)
        options = Options(reduction, label_smoothing, z_loss, softcap, weight, inplace=inplace, bias=bias)
        chosen = choose_cases(where, ops, SizeWords(shape, vocab, rows, hidden, dtype, preset), options)
        # Without names somebody has to ask who can run here; with names the processes find out by themselves.
        names = cases.words(backend)
        check_installed(names)
        names = names or [b.name for b in find_backends(where) if b.available]
    except (ValueError, RuntimeError) as error:
        raise mistake(error) from error
    tasks = compiling.make_tasks(names, chosen)
    begin = time.monotonic()
    outcomes: list[Done[CompileTask, None]] = []
    isolation = Isolation(jobs or default_jobs(), time_limit)
    interrupted = run_all(compiling.compile_case, tasks, where, isolation, quiet, outcomes.append)
    failed = sum(outcome.failure is not None for outcome in outcomes)
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in compiling.seconds_by_backend(outcomes).items())
    make_console().print(
        f"{len(outcomes) - failed} of {len(tasks)} compiled in {time.monotonic() - begin:.0f} s ({spent})",
        highlight=False,
    )
    broken = compiling.broken(outcomes)
    for line in broken:
        make_console().print(f"[red]did not compile:[/] {escape(line)}", highlight=False)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if broken:
        raise typer.Exit(1)


@app.command("accuracy")
def accuracy_command(
    ops: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help=f"{', '.join(_ACCURACY_OPS)}; default: all.")
    ] = None,
    backend: BackendOption = None,
    shape: Annotated[str, typer.Option("--shape", "-s", help="ROWSxCLASSES.")] = "64x4099",
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", "-d", help="Default: float32, bfloat16, float16.")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help=f"Inputs: {', '.join(KINDS)}; default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    json_file: JsonOption = None,
    markdown: MarkdownOption = None,
    resume: ResumeOption = None,
    jobs: JobsOption = None,
    time_limit: TimeLimitOption = 120.0,
    in_process: InProcessOption = False,
    device: DeviceOption = None,
    quiet: QuietOption = False,
) -> None:
    """Measure the error of loss and gradient against float64, over easy and hard inputs.

    Errors are counted in units of rounding of the result's dtype; a result that is rounded once is within 0.5.

    For example:

      loss-bench accuracy cross_entropy --dtype bf16 --kind ordinary,masked --shape 64x50257

      loss-bench accuracy --json errors.json; loss-bench accuracy --resume errors.json --json errors.json
    """
    try:
        where = choose_device(device)
        backends = chosen_backends(cases.words(backend), where)
        dtypes = [cases.parse_dtype(name) for name in cases.words(dtype)] or ["float32", "bfloat16", "float16"]
        kinds = cases.words(kind) or list(KINDS)
        for name in kinds:
            check_choice("kind", name, tuple(KINDS))
        check_writable(json_file, markdown)
        names = cases.words(ops) or list(_ACCURACY_OPS)
        for name in names:
            check_choice("op", name, _ACCURACY_OPS)
        rows, classes, _ = cases.parse_shape(shape, names)
        chosen = cases.build_cases(names, [cases.Size(rows, classes, "float32")], dtypes=dtypes)
        tasks = accuracy.make_tasks(chosen, kinds, backends, seed)
        name = device_name(where)
        found = {task: new_accuracy(task, name, "unavailable", task.refusal) for task in tasks if task.refusal}
        earlier = read_report(resume) if resume else None
        if earlier is not None:
            found |= earlier_errors(earlier, tasks, name, seed)
    except (ValueError, RuntimeError) as error:
        raise mistake(error) from error
    result = _new_report(where, {"seed": seed, "shape": shape}, backends, earlier)

    def keep(outcome: Done[AccuracyTask, Accuracy]) -> None:
        task, failure = outcome.task, outcome.failure
        found[task] = outcome.result or new_accuracy(task, name, *(failure or ("error", "no result")))
        result.accuracy = errors_json(tasks, found, earlier)
        if json_file is not None:
            result.write(json_file)

    isolation = Isolation(None if in_process else jobs or default_jobs(), time_limit)
    missing = [task for task in tasks if task not in found]
    result.accuracy = errors_json(tasks, found, earlier)
    interrupted = run_all(accuracy.measure_accuracy, missing, where, isolation, quiet, keep)
    deliver(result, json_file, markdown, interrupted=interrupted)


def _new_report(
    device: torch.device, settings: dict[str, Any], backends: Sequence[BackendRow], earlier: Report | None
) -> Report:
    """A report with all of an `earlier` one that it goes on from."""
    result = Report(environment(device), settings=settings, command=command_line())
    result.backends = [asdict(backend) for backend in backends]
    if earlier is not None:
        result.rows = earlier.rows
        result.take_over(earlier)
    return result


@app.command()
def train(
    backend: BackendOption = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text to learn; default: the Python standard library's sources.", exists=True, dir_okay=False
        ),
    ] = None,
    size: Annotated[str | None, typer.Option(help=f"{', '.join(SIZES)}; default: by the device.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the optimizer.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences in a step.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens in a sequence.")] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=256, help="256 for bytes; more for a byte-pair encoding (extra tokens).")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", "-d", help="Of the matrix products and the logits.")] = None,
    seed: Annotated[int, typer.Option(help="Of the model and of the order of the data.")] = 0,
    save_logits: Annotated[
        Path | None,
        typer.Option("--save-logits", help="Write the last step's logits and labels (safetensors), for run --logits."),
    ] = None,
    json_file: JsonOption = None,
    markdown: MarkdownOption = None,
    resume: ResumeOption = None,
    time_limit: TimeLimitOption = 120.0,
    in_process: InProcessOption = False,
    device: DeviceOption = None,
    quiet: QuietOption = False,
) -> None:
    """Train a small transformer on bytes or tokens with each backend: the same curves, tokens/s, peak memory.

    The seed and the order of the data are the same for all, so that only the loss function differs.

    For example:

      loss-bench train --backend torch-nn,triton --json curves.json

      loss-bench train --vocabulary 4096 --text book.txt --save-logits step.safetensors

      loss-bench train --json curves.json; loss-bench train --resume curves.json --json curves.json
    """
    try:
        where = choose_device(device)
        check_writable(json_file, markdown, replaced=save_logits)
        found = chosen_backends(cases.words(backend), where)
        chosen = _train_size(where, size, steps=steps, batch=batch, context=context, dtype=dtype, vocabulary=vocabulary)
        data = read_text(text)
        # Here too, so that mistakes are named before anything runs; an encoding is learnt once.
        check_length(encode(data, chosen.vocabulary), chosen)
        settings = {**asdict(chosen), "seed": seed, "text": str(text or "stdlib"), "text_sha256": digest(data)}
        # A backend that was named is tried even where it says that it cannot run, so that its reason is shown.
        names = cases.words(backend) or [b.name for b in found if "cross_entropy" in b.ops and b.available]
        earlier = read_report(resume) if resume else None
        curves = earlier_curves(earlier, found, settings, device_name(where)) if earlier else {}
        tasks = [TrainTask(name, chosen, seed, text, save_logits) for name in names if name not in curves]
        if save_logits is not None and not tasks:
            raise ValueError(f"no backend is left to train for --save-logits: {resume} has the curves of all")
    except (ValueError, RuntimeError) as error:
        raise mistake(error) from error
    except ModuleNotFoundError as error:
        raise mistake(f"{error.name} is not installed; pip install 'loss-bench[tokens]'") from error
    result = _new_report(where, settings, found, earlier)
    if save_logits is not None:
        save_logits.unlink(missing_ok=True)

    def add_curves() -> None:
        ordered = [curves[name] for name in names if name in curves]
        compare_curves(ordered, chosen)
        result.train = curves_json(ordered, earlier)

    def keep(outcome: Done[TrainTask, Curve]) -> None:
        failure = outcome.failure or ("error", "no result")
        curves[outcome.task.backend] = outcome.result or failed_curve(outcome.task, where, failure)
        add_curves()
        if json_file is not None:
            result.write(json_file)

    add_curves()
    isolation = Isolation(None if in_process else 1, time_limit)
    interrupted = run_all(train_with, tasks, where, isolation, quiet, keep)
    deliver(result, json_file, markdown, interrupted=interrupted)


@app.command("report")
def report_command(
    results: Annotated[
        list[Path],
        typer.Argument(metavar="FILES", help="JSON files of run, accuracy or train.", exists=True, dir_okay=False),
    ],
    markdown: MarkdownOption = None,
    csv: Annotated[Path | None, typer.Option("--csv", help="Write the rows as CSV.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one self-contained page. Needs the extra report.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", help="Folder for PNG and SVG plots. Needs the extra report.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all files merged into one.")] = None,
    summary: Annotated[
        Path | None, typer.Option("--summary", help="Write a small Markdown table of one pass: cases x backends.")
    ] = None,
    pass_: Annotated[
        list[str] | None,
        typer.Option(
            "--pass",
            help=f"That pass, of {', '.join(cases.PASSES)}; default: forward+backward. Of several: shares.",
        ),
    ] = None,
    op: Annotated[list[str] | None, typer.Option("--op", help="Its ops; default: all.")] = None,
    backends: Annotated[
        list[str] | None, typer.Option("--backends", help="Its columns, in this order; default: all that can run.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no tables.")] = False,
) -> None:
    """Show results again, merged: of a measurement that several files hold, the last is kept.

    For example:

      loss-bench report h100.json h200.json --html page.html

      loss-bench report results.json --quiet --markdown tables.md --csv rows.csv --plots plots

      loss-bench report results.json --quiet --summary table.md --pass no-grad --backends torch-nn,triton

      loss-bench report results.json --quiet --summary table.md --op softmax --pass forward,backward
    """
    try:
        if summary is None and (pass_ or op or backends):
            raise ValueError("--pass, --op and --backends go with --summary")
        passes, ops = cases.words(pass_) or ["forward+backward"], cases.words(op)
        for name in passes:
            check_choice("pass", name, cases.PASSES)
        for name in ops:
            check_choice("op", name, cases.OPS)
        check_writable(markdown, csv, html, json_file, summary, plots and plots / "plot.svg")
        found = merge([read_report(path) for path in results])
        if summary is not None:
            files.write(summary, report.summary_markdown(found, passes, cases.words(backends), ops))
    except ValueError as error:
        raise mistake(error) from error
    if not quiet:
        report.print_report(found, make_console())
    for path, text in ((markdown, report.to_markdown), (csv, report.to_csv)):
        if path is not None:
            files.write(path, text(found))
    if html is not None or plots is not None:
        _draw(found, html, plots)
    if json_file is not None:
        found.write(json_file)


def _draw(found: Report, html: Path | None, plots: Path | None) -> None:
    from loss_bench.page import to_html
    from loss_bench.plots import write_plots

    try:
        if html is not None:
            files.write(html, to_html(found))
        if plots is not None:
            write_plots(found, plots)
    except ModuleNotFoundError as error:
        raise mistake(f"{error.name} is not installed; pip install 'loss-bench[report]'") from error


@app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of the files that [bold]--json[/] writes, for tools that read or check them.

    For example:

      loss-bench schema > loss-bench.schema.json
    """
    typer.echo(schema_text(), nl=False)


@app.command("compare")
def compare_command(
    old: Annotated[Path, typer.Argument(help="JSON file of the earlier run.", exists=True, dir_okay=False)],
    new: Annotated[Path, typer.Argument(help="JSON file of the later run.", exists=True, dir_okay=False)],
    fail_above: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Exit with 1 if a median is more than this times the old one, such as 1.05, and surely larger.",
        ),
    ] = None,
) -> None:
    """Compare two runs: the ratio of the medians of every measurement that both hold, with its interval.

    The interval is that of the ratio if each median is within its own 95% interval; fewer than 6 samples have none, and
    then nothing is sure.

    A measurement that was timed before and now is wrong or fails sets the exit status in any case.

    For example:

      loss-bench compare before.json after.json --fail-above 1.05
    """
    try:
        changes = compare(read_report(old), read_report(new))
    except ValueError as error:
        raise mistake(error) from error
    if not changes:
        raise mistake("the two files have no measurement in common (op, shape, dtype, options, pass, backend, device)")
    make_console().print(comparison_table(changes, fail_above))
    if any(change.fails(fail_above if fail_above is not None else float("inf")) for change in changes):
        raise typer.Exit(1)


def _train_size(device: torch.device, name: str | None, **changes: Any) -> TrainSize:
    name = name or ("small" if device.type == "cpu" else "gpu")
    check_choice("size", name, tuple(SIZES))
    if changes["dtype"] is not None:
        changes["dtype"] = cases.parse_dtype(changes["dtype"])
    return replace(SIZES[name], **{key: value for key, value in changes.items() if value is not None})

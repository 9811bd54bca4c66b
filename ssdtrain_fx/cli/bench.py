"""``ssdtrain-fx bench``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from ssdtrain_fx.cli.common import (
    EXIT_DIFFERENT,
    EXIT_FAILED,
    DeviceOption,
    JsonTarget,
    SsdDirOption,
    StepProgress,
    check_target,
    load_callable,
    parse_options,
    written,
)
from ssdtrain_fx.default_options import config_with_defaults
from ssdtrain_fx.runtime.storage.directory import check_directories
from ssdtrain_fx.studies.bench import BASE, describe, find_base, render_table, to_json
from ssdtrain_fx.studies.measure import Run, Variant, WorkerError, choose_device, plan_turns, take_turns
from ssdtrain_fx.studies.memory_picture import draw_memory
from ssdtrain_fx.studies.own_models import is_own_model
from ssdtrain_fx.studies.zoo import MODELS

VARIANTS = tuple(name for name in get_args(Variant) if name != "budget")
"""Without the one that is a family: it takes a budget, which `benchmarks/rivals.py` sweeps."""


def bench(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}; or module:callable, see below.")] = "gpt2",
    layers: Annotated[int, typer.Option(min=1, help="t5: half of them in the encoder.")] = 12,
    hidden: Annotated[int, typer.Option(min=64)] = 384,
    batch: Annotated[int, typer.Option(min=1)] = 8,
    sequence: Annotated[int, typer.Option(min=8, help="Tokens, or pixels along one side of an image.")] = 512,
    vocab: Annotated[int, typer.Option(min=2)] = 2048,
    dropout: Annotated[float, typer.Option(min=0, max=1)] = 0.0,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option()] = "float32",
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant",
            metavar="|".join(VARIANTS),
            help=f"What to compare with {BASE}, which always runs; may be repeated. Default: ssdtrain and checkpoint.",
        ),
    ] = None,
    regional: Annotated[
        bool, typer.Option("--regional", help="Also compile each layer on its own, with Inductor and with ssdtrain.")
    ] = False,
    steps: Annotated[
        int,
        typer.Option(
            min=2, help="Rounds. The first one compiles and does not count; of more than 4, the second neither."
        ),
    ] = 8,
    device: DeviceOption = "auto",
    seed: Annotated[int, typer.Option(help="Other weights, other batches.")] = 0,
    ssd_dir: SsdDirOption = None,
    options: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Option of the backend; may be repeated.")
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all results here; - prints them.")] = None,
    png_path: Annotated[Path | None, typer.Option("--png", help="Picture of memory over one step.")] = None,
) -> None:
    """Compare step time, memory and gradients pairwise: plain Inductor, ssdtrain, per-layer checkpointing.

    Example: ssdtrain-fx bench --model bert --sequence 256 --option max_slowdown=0.1 --json bert.json

    Run it while the machine is otherwise idle. Checkpointing may differ in bits, ssdtrain may not.

    module:callable names your own function without arguments that returns a model and a tuple of its inputs. The model
    returns its loss. Sizes, dropout and types are then those of the function, and only ssdtrain runs by default.

    Exit code: 0 ssdtrain is equal to the bit, or chunk_loss is on, which changes last bits; 1 a loss or gradient of it
    differs; 2 wrong usage; 3 a run failed.
    """
    target = JsonTarget(json_path)
    console = target.console
    check_target(png_path, "--png")
    own = is_own_model(model)
    chosen = dict.fromkeys((BASE, *(variants or (("ssdtrain",) if own else ("ssdtrain", "checkpoint")))))
    for hint, names, valid in (("--model", () if own else (model,), tuple(MODELS)), ("--variant", chosen, VARIANTS)):
        for name in names:
            if name not in valid:
                raise typer.BadParameter(f"{name!r} is not one of {', '.join(valid)}.", param_hint=hint)
    if own:
        load_callable(model, hint="--model")
    try:
        chosen_options = parse_options(options or [])
        if ssd_dir:
            chosen_options["ssd_dir"] = [str(path.resolve()) for path in ssd_dir]
        config = config_with_defaults(chosen_options)
        directories = check_directories(config.engine_config().ssd_dir)
        run = Run(
            model=model,
            layers=layers,
            hidden=hidden,
            batch=batch,
            sequence=sequence,
            vocab=vocab,
            dropout=dropout,
            dtype=dtype,
            device=choose_device(device),
            seed=seed,
            options=chosen_options,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    runs = [dataclasses.replace(run, variant=cast(Variant, variant)) for variant in chosen]
    if regional:
        by_layer: tuple[Variant, ...] = (BASE, "ssdtrain")
        runs += [dataclasses.replace(run, variant=variant, regional=True) for variant in by_layer]

    try:
        with StepProgress(console, plan_turns(runs, steps)) as progress:
            results = take_turns(runs, steps=steps, on_step=progress.step_done)
    except WorkerError as error:
        console.print("[bold red]A run failed.[/]")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(EXIT_FAILED) from error

    console.print(render_table(results))
    target.write(json.dumps(to_json(results, directories), indent=2))
    if png_path is not None:
        with written(png_path, "Memory over one step", console):
            draw_memory(results, png_path, title=describe(results[0].run))
    if any(one.run.variant == "ssdtrain" and not one.equals(find_base(one, results)) for one in results):
        if config.chunk_loss == "off":
            console.print("[bold red]ssdtrain does not agree with plain Inductor to the bit.[/]")
            raise typer.Exit(EXIT_DIFFERENT)
        console.print(
            "With chunk_loss, sums over tokens are formed chunk by chunk, so the last bits of ssdtrain differ. To "
            "compare bits, leave it out.",
            highlight=False,
        )

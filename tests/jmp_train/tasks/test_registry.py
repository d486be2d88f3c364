"""Each task is declared once, and each option; what is made of the declarations agrees with them."""

import argparse
import importlib
from pathlib import Path

import pytest

from jmp_train.cli.arguments import Parser
from jmp_train.cli.entry import main
from jmp_train.cli.options import (
    RunOptions,
    add_options,
    as_arguments,
    read_options,
)
from jmp_train.runs.run_identity import run_metadata
from jmp_train.tasks import TASK_NAMES, TaskOptions, load_task, options_of
from jmp_train.tasks.registry import TASKS

pytestmark = pytest.mark.quick

GIVEN = TaskOptions(
    devices=2,
    data_dir=Path("-x y"),
    synthetic=True,
    train_size=4,
    model="-gat",
    dataset="-cora",
    heads=(2, 1, 2),
    scale=1e-05,
    image_size=32,
    text_file=Path("-text"),
    remat=True,
    accumulate_steps=2,
)


def parsed(kind: type, arguments: list[str]) -> argparse.Namespace:
    parser = Parser()
    add_options(parser, kind)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    "options",
    [
        TaskOptions(),
        GIVEN,
        RunOptions(),
        RunOptions(epochs=3, batch_size=8, seed=7, growth_interval=5, logdir=Path("-log")),
        RunOptions(state_dtypes=("mu=int8", "nu=uint8"), parameters="kahan", fp8="DelayedScaling"),
    ],
)
def test_the_parser_reads_what_is_passed_to_a_process(options: TaskOptions | RunOptions) -> None:
    kind = type(options)
    assert read_options(kind, parsed(kind, as_arguments(options))) == options


def test_every_option_is_given_in_the_test_above() -> None:
    assert [name for name in options_of(TaskOptions) if getattr(GIVEN, name) == getattr(TaskOptions(), name)] == []


def test_the_options_of_the_tasks_are_declared() -> None:
    for task in TASKS.values():
        assert set(task.options) <= set(options_of(TaskOptions)), task
        assert callable(importlib.import_module(task.module).load)
    for name in options_of(TaskOptions):
        assert any(task.has(name) for task in TASKS.values()), name
    assert tuple(TASKS) == TASK_NAMES


def test_help_that_names_a_task_names_one_that_has_the_option() -> None:
    for name, option in options_of(TaskOptions).items():
        for task in TASKS.values():
            if task.name in option.help:
                assert task.has(name), (name, task.name)


@pytest.mark.parametrize("name", ["karate", "cora"])
def test_the_first_model_is_the_default_and_each_has_a_recipe(name: str) -> None:
    files = TaskOptions(synthetic=TASKS[name].has("synthetic"))
    assert load_task(name, files).options.model == TASKS[name].models[0]
    if name == "cora":
        recipes = importlib.import_module("jmp_train.tasks.cora").RECIPES
        assert tuple(recipes) == TASKS["cora"].models


@pytest.mark.parametrize(
    ("option", "value", "task", "message"),
    [
        (
            "devices",
            2,
            "karate",
            "task karate trains on a whole graph, which it does not cut: --devices is for .*, cifar10, vit-b16, lm",
        ),
        (
            "accumulate_steps",
            2,
            "cora",
            "task cora trains on a whole graph, which has no parts: --accumulate-steps is for digits, .*, vit-b16, lm",
        ),
        ("synthetic", True, "digits", "task digits brings its data: it takes no --data-dir and no --synthetic"),
        ("data_dir", Path("x"), "karate", "task karate brings its data: it takes no --data-dir and no --synthetic"),
        ("model", "gat", "mnist", "model='gat': task mnist has one model only"),
        ("heads", (1, 1, 1), "cora", r"heads=\(1, 1, 1\): task cora has no such option, only reddit has"),
        ("image_size", 32, "digits", "image_size=32: task digits has no such option, only vit-b16 has"),
        ("text_file", Path("x"), "digits", "text_file=x: task digits has no such option, only lm has"),
        ("remat", True, "vit-b16", "remat=True: task vit-b16 has no such option, only lm has"),
        ("data_dir", Path("x"), "lm", "task lm brings its data: it takes no --data-dir and no --synthetic"),
    ],
)  # fmt: skip
def test_a_task_refuses_an_option_that_it_does_not_have(option: str, value: object, task: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        load_task(task, TaskOptions(**{option: value}))  # pyright: ignore[reportArgumentType]


def test_what_a_checkpoint_says_of_its_run_has_the_keys_that_were_written_before() -> None:
    task = load_task("karate")
    run = run_metadata(task, "float32", 3, 2, 0, task.shared())["run"]
    data = run.pop("data")
    assert len(data) == 16
    assert run == {
        "task": "karate", "model": "gcn", "heads": None, "scale": None, "image_size": None,
        "synthetic": False, "train_size": 2, "policy": "float32", "epochs": 3, "batch_size": 2,
        "devices": 1, "seed": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("cora", "task cora wants --data-dir, the folder of ind.cora.x and the other seven"),
        ("cora --data-dir nowhere", "nowhere is not a folder; Planetoid's files are public in"),
        ("cora --data-dir .", "data_dir . lacks ind.cora.x, ind.cora.tx, ind.cora.allx, ind.cora."),
        ("cora --data-dir . --synthetic", "--data-dir and --synthetic exclude each other"),
        ("lm --text-file nowhere", "nowhere: No such file or directory"),
        ("lm --text-file /", "/ is not a regular file"),
        ("lm --model gpt2", "model='gpt2' is not one of task lm's: tiny, small, gpt2-small"),
        ("cora --synthetic --model gin", "model='gin' is not one of task cora's: gcn, gat, sage"),
        ("cora --synthetic --heads 2 2 2", "heads=(2, 2, 2): task cora has no such option"),
        ("cora --synthetic --scale 0.5", "scale=0.5: task cora has no such option, only reddit"),
        ("cora --synthetic --train-size 141", "train_size=141 must be between 1 and the 140"),
        ("reddit", "task reddit wants --data-dir, the folder of reddit_graph.npz and reddit_data"),
        ("reddit --data-dir nowhere", "nowhere is not a folder; Reddit's two files are public in"),
        ("reddit --data-dir . --synthetic", "--data-dir and --synthetic exclude each other"),
        ("reddit --data-dir . --scale 0.5", "scale=0.5: the real graph has one size; add --synth"),
        ("reddit --synthetic --model gat", "model='gat': task reddit has one model only"),
        ("reddit --synthetic --scale 0.0001", "scale=0.0001 leaves 23 nodes of 232965; 100 are"),
        ("mnist --synthetic --scale 0.5", "scale=0.5: task mnist has no such option, only reddit"),
        ("karate --heads 2 2 2", "heads=(2, 2, 2): task karate has no such option, only reddit"),
    ],
)
def test_options_that_do_not_suit_are_one_line(args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *args.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1

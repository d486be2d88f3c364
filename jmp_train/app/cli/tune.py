"""`jmp-train tune`: finds the rules for the operations of a task in half precision or few bits, and writes a file."""

import dataclasses
import sys
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from jmp_train.app.cli.diagnose import saved_state
from jmp_train.app.cli.jobs import Call, load_job
from jmp_train.app.cli.option_values import above_zero, count, path, positive
from jmp_train.app.cli.options import BatchOptions, option
from jmp_train.app.cli.results import PROBLEMS_FOUND, WrongCall, check_outputs, checking_the_call, show
from jmp_train.app.runs import RECIPES, FewBits, make_setup, run_optimizer
from jmp_train.app.tasks import errors_of_file
from jmp_train.steps import TrainState, TrainStep
from jmp_train.tools.tuning import TunedRules, tune

_EXAMPLES = 4
_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float4_e2m1fn", "int8")
_STATELESS = [name for name in RECIPES if not FewBits(fp8=name).has_fp8_state]


@dataclasses.dataclass(frozen=True)
class TuneOptions(BatchOptions):
    """Options of `jmp-train tune`.

    Attributes:
      dtype: default: float16; also bfloat16; float8_e4m3fn, float4_e2m1fn or int8 for products of a step in bfloat16
      fp8: see below.
      out: write the rules to FILE, for --rules
      page: write the report to FILE, an HTML page
      checkpoint_dir: take the state from a float32 run's last checkpoint
      after: train N steps in float32 first
      examples: tune for N batches, the last one held out; default: 4
      tolerance: relative error of loss and gradient; default: jt.tuning.Tolerance's
      budget: try at most N choices
      steps: train N steps next to float32 at the end
    """

    dtype: str = option(str, "NAME", default="float16", choices=_DTYPES)
    fp8: str | None = option(
        str,
        "RECIPE",
        choices=_STATELESS,
        help=f"products in 8 or 4 bits, by one of that dtype: {', '.join(_STATELESS)}",
    )
    out: Path | None = option(path, "FILE")
    page: Path | None = option(path, "FILE")
    checkpoint_dir: Path | None = option(path, "DIR")
    after: int = option(count, "STEPS", default=0)
    examples: int | None = option(positive)
    tolerance: float | None = option(above_zero)
    budget: int = option(positive, default=1000)
    steps: int = option(count, default=20)


def tune_command(call: Call[TuneOptions]) -> int:
    """Tunes the rules of a task, prints and writes the results, and returns the exit code."""
    from jmp_train.app.reports import trials_shown

    options, output = call.options, call.output
    if options.out is not None and options.page is not None and options.out.absolute() == options.page.absolute():
        raise WrongCall(f"--out and --page are both {options.out}")
    files = {"--out": options.out, "--page": options.page}
    check_outputs(files=files)
    recipe = RECIPES[options.fp8]() if options.fp8 else None
    if recipe is not None and recipe.forward_dtype != options.dtype:
        raise WrongCall(f"--fp8 {options.fp8} needs --dtype {recipe.forward_dtype.name}, got {options.dtype}")
    with errors_of_file(call.source.file):
        step, examples = _examples(call)
        done = int(examples[0][0].step)
        with trials_shown(sys.stderr) if output is None else nullcontext() as progress:
            tuned = tune(
                step,
                examples,
                dtype=options.dtype,
                tolerance=options.tolerance,
                budget=options.budget,
                steps=options.steps,
                progress=progress,
                recipe=recipe,
            )
        subject = {"task": call.source.name, "step": done, "examples": len(examples)}
        title = f"{call.source.name}, {options.dtype}, step {done}"
        show(
            output,
            lambda: f"{title}:\n{tuned}" + ("" if options.out else f"\n{tuned.code()}"),
            subject,
            tuned.to_json(),
            {
                options.out: lambda: tuned.rules.save(str(options.out), comment=_comment(title, subject, tuned)),
                options.page: lambda: tuned.to_html(title),
            },
        )
        return 0 if tuned.verification.passed else PROBLEMS_FOUND


def _comment(title: str, subject: Mapping[str, Any], tuned: TunedRules) -> str:
    """Returns the comment of a rules file: subject, tolerance, and the entries with their reasons."""
    t = tuned.tolerance
    made = ", ".join(f"{name} {value}" for name, value in subject.items())
    return (
        f"jmp-train tune: {title}\n{made}\n"
        f"tolerance: loss {t.loss:.3g}, gradient {t.gradient:.3g}, leaf {t.leaf:.3g}, cosine {t.cosine:.3g}\n"
        f"{tuned}\nEntries by line follow the code: renew them when it is edited.\n\n"
    )


def _examples(call: Call[TuneOptions]) -> tuple[TrainStep, list[tuple[TrainState, Any]]]:
    """Returns the step to tune, and a state with each of the next batches of a run in float32."""
    options = call.options
    with checking_the_call():
        job = load_job(call)
        if job.settings.devices != 1:
            raise WrongCall(f"--devices {job.settings.devices}: tune runs on one device")
        if job.settings.accumulate_steps != 1:
            raise WrongCall(f"--accumulate-steps {job.settings.accumulate_steps}: tune uses whole batches")
        prepared, state = job.prepare("float32", with_metadata=options.checkpoint_dir is not None)
    total = prepared.length.total
    saved = saved_state(options.checkpoint_dir, prepared, state)
    done, state, place = saved.done, saved.state, saved.place
    wanted = options.examples or _EXAMPLES
    if total is not None:
        left = max(1, total - done - options.after)  # at the end of a run there is the last batch
        if done + options.after > total or (options.examples or 1) > left:
            given = [f"--{name} {value}" for name in ("after", "examples") if (value := getattr(options, name))]
            raise WrongCall(f"{' '.join(given)}: the run has {total} steps{f', and {done} are done' * bool(done)}")
        wanted = min(wanted, left)
    if options.after:
        state, _ = prepared.advance(state, done, options.after, place)
    # The last of these batches, because at the end of a run there is no next one.
    batches = deque(islice(prepared.batches(done, place), options.after + wanted), maxlen=wanted)
    # The same step, with the loss scale of training by the rules.
    made = run_optimizer(job.task, state.params, total, job.settings)
    half = options.dtype if options.dtype in _DTYPES[:2] else "bfloat16"
    setup = make_setup(job.task, f"autocast_{half}", made, job.settings)
    if not setup.keeps_loss_scale:
        state = dataclasses.replace(state, opt_state=state.opt_state._replace(loss_scale=setup.loss_scale))
    return setup.step, [(state, batch) for batch in batches]

"""Measures what `jmp_train.tune` costs and finds, compared with a search that recompiles the model for each trial.

    python benchmarks/tune.py [--cases mnist terrain ...] [--rounds 3] [--json FILE]
    python benchmarks/tune.py --parts breaking      # models that break in half precision
    python benchmarks/tune.py --tiny --rounds 1     # in small sizes, to see that it runs

A case is the loss of a model and its gradient, each in its own process: MNIST's network, ResNet-34, a vision
transformer of ViT-tiny's sizes, a graph attention network, a language model whose blocks are a scan, and the models of
`rescue_models`, which torch's table in float16 does not train. Compile time is that of all programs of a tuning,
search time only that of its trials. The peer runs `autocast` with the rules under `jax.jit` on all examples of the
search. `--rounds` of its trials are timed, the first without float32 entries, and each further one with one more of
the entries that `tune` found. A search by it would take that time per trial.

`breaking` tunes the models of `breaking_models`, whose loss or gradient is wrong in half precision. Errors are the
largest over all examples, including those outside of the search; fractions are of the operations that may run in half
precision. In the file, null stands for infinity. An existing file keeps its other part.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from breaking_models import BREAKING
from rescue_models import MODELS, moments
from result_files import write_results
from tune_models import CASES, Case

import jmp_train as jt

RESCUED = {make.__name__: make for make in MODELS}
COLUMNS = (
    ("choices", "choices", "{:.0f}"),
    ("compile_seconds", "compile", "{:.1f} s"),
    ("trials", "trials", "{:.0f}"),
    ("seconds", "search", "{:.2f} s"),
    ("trials_a_second", "trials/s", "{:.1f}"),
    ("peer_trials_a_second", "peer's", "{:.2f}"),
    ("ratio", "ratio", "{:.0f}"),
    ("entries", "entries", "{:.0f}"),
)


def main() -> None:
    """Prints a table of the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    cases = [*CASES, *RESCUED, *BREAKING]
    parser.add_argument("--cases", nargs="+", choices=cases, default=cases)
    parser.add_argument("--parts", nargs="+", choices=("costs", "breaking"), default=("costs", "breaking"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--case", choices=cases, help="measure this one here, and print it as JSON")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.case in BREAKING:
        print(json.dumps(mended(BREAKING[args.case](args.tiny))))
        return
    if args.case:
        print(json.dumps(measured(case_of(args.case, args.tiny), args.rounds)))
        return
    results: dict[str, Any] = json.loads(args.json.read_text()) if args.json and args.json.exists() else {}
    broken = [name for name in args.cases if name in BREAKING]
    costly = [name for name in args.cases if name not in BREAKING]
    if "costs" in args.parts and costly:
        results["cases"] = costs(costly, args)
    if "breaking" in args.parts and broken:
        results["breaking"] = breaking(broken, args)
    if args.json:
        write_results(args.json, results)


def costs(names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Prints what tuning costs, one line per case."""
    heads = [f"{title:>9}" for _, title, _ in COLUMNS]
    print(f"{'':<17}{''.join(heads)}{'flops in half':>17}{'elements':>17}  holds")
    results = {}
    for name in names:
        found = results[name] = in_a_process(name, args)
        cells = [f"{form.format(found[key]):>9}" for key, _, form in COLUMNS]
        shares = [" to ".join(f"{x:.1%}" for x in found[key]) for key in ("half_flops", "half_elements")]
        holds = "yes" if found["holds"] else "no"
        print(f"{name:<17}{''.join(cells)}{shares[0]:>17}{shares[1]:>17}  {holds}", flush=True)
    print("shares: by torch's table, and tuned; the peer compiles for each trial")
    return results


def breaking(names: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Prints what half precision does to the models that it breaks, before and after tuning."""
    print(
        f"\n{'':<17}{'':>9}{'loss':>12}{'loss off':>10}{'grad. off':>10}{'flops':>8}{'values':>8}{'trials':>8}{'s':>7}"
    )
    results = {}
    for name in names:
        found = results[name] = in_a_process(name, args)
        for choice in ("float32", "all half", "tuned"):
            row = found[choice]
            cells = f"{row['loss']:>12.5g}{row['loss_error']:>10.1e}{row['gradient_error']:>10.1e}"
            cells += f"{row['half_flops']:>8.1%}{row['half_elements']:>8.1%}"
            if choice == "tuned":
                holds = "" if found["holds"] else "  does not hold"
                cells += (
                    f"{found['trials']:>8}{found['seconds']:>7.1f}  {', '.join(found['entries']) or 'nothing'}{holds}"
                )
            print(f"{name if choice == 'float32' else '':<17}{choice:>9}{cells}", flush=True)
            found[choice] = {key: value if math.isfinite(value) else None for key, value in row.items()}
    print("flops and values: fractions in half precision; last, what the rules keep in float32")
    return results


def in_a_process(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what a fresh process measures, so that no case has another's programs."""
    command = [sys.executable, __file__, "--case", name, "--rounds", str(args.rounds)]
    result = subprocess.run(
        [*command, *(["--tiny"] if args.tiny else [])], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def case_of(name: str, tiny: bool) -> Case:
    """Returns a case; of a model to be rescued moments of its training, since some fail only after a while."""
    if name in CASES:
        return CASES[name](tiny)
    make = RESCUED[name]
    return Case(make(0).loss_fn, moments(make))


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Returns what a tuning took and found, and what the peer takes for a trial."""
    began = time.perf_counter()
    tuned = jt.tune(case.loss_fn, case.examples, dtype="float16")
    whole = time.perf_counter() - began
    peer = statistics.median(peer_seconds(case, tuned, count) for count in range(rounds))
    rate = tuned.trials / tuned.seconds
    return {
        "choices": tuned.choices,
        "compile_seconds": tuned.compile_seconds,
        "trials": tuned.trials,
        "seconds": tuned.seconds,
        "whole_seconds": whole,
        "trials_a_second": rate,
        "peer_trials_a_second": 1 / peer,
        "peer_seconds": peer * tuned.trials,
        "ratio": rate * peer,
        "entries": len(tuned.entries),
        "half_flops": tuned.half_flops,
        "half_elements": tuned.half_elements,
        "holds": tuned.verification.passed,
    }


def mended(case: Case) -> dict[str, Any]:
    """Returns the errors of a case in half precision, and by the rules that a tuning finds."""
    began = time.perf_counter()
    tuned = jt.tune(case.loss_fn, case.examples, dtype="float16")
    seconds = time.perf_counter() - began
    report = jt.explain_autocast(jt.autocast(case.loss_fn, rules=jt.MOSTLY_HALF), *case.examples[0])
    shares = {
        "float32": (0.0, 0.0),
        "all half": (report.half_flops_share, report.half_elements_share),
        "tuned": (tuned.half_flops[1], tuned.half_elements[1]),
    }
    rules = {"float32": None, "all half": jt.MOSTLY_HALF, "tuned": tuned.rules}
    rows = {}
    for name, (flops, elements) in shares.items():
        errors = errors_by(case, rules[name], tuned.loss_scale)
        rows[name] = {**errors, "half_flops": flops, "half_elements": elements}
    return {
        **rows,
        "entries": [", ".join(entry.primitives) for entry in tuned.entries],
        "choices": tuned.choices,
        "loss_scale": tuned.loss_scale,
        "trials": tuned.trials,
        "seconds": seconds,
        "holds": tuned.verification.passed,
    }


def errors_by(case: Case, rules: jt.AutocastRules | None, scale: float) -> dict[str, float]:
    """Returns a loss, and the largest relative errors of loss and gradient; of what is not finite they are infinite.

    Args:
      case: whose first example's loss is returned.
      rules: of autocast to float16; None for float32.
      scale: the loss scale.
    """
    exact = jax.jit(jax.value_and_grad(case.loss_fn))
    half_loss = case.loss_fn if rules is None else jt.autocast(case.loss_fn, "float16", rules=rules)
    scaled = jax.jit(jax.value_and_grad(lambda params, batch: scale * half_loss(params, batch).astype("float32")))
    losses, errors = [], []
    for example in case.examples:
        (loss, gradient), (wanted, wanted_gradient) = scaled(*example), exact(*example)
        pairs = (loss / scale, wanted), (_flat(gradient) / scale, _flat(wanted_gradient))
        off = [float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) for x, y in pairs]
        losses.append(float(loss / scale))
        errors.append([x if math.isfinite(x) else math.inf for x in off])
    loss_error, gradient_error = (max(each) for each in zip(*errors, strict=True))
    return {"loss": losses[0], "loss_error": loss_error, "gradient_error": gradient_error}


def _flat(tree: Any) -> jax.Array:
    return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(tree)])


def peer_seconds(case: Case, tuned: jt.tuning.TunedRules, count: int) -> float:
    """Returns the seconds of a trial that compiles the model.

    Args:
      case: what is tuned.
      tuned: what was found.
      count: number of entries in float32. One more entry, for sums, which are float32 anyway, makes the rules new.
    """
    expressions = [x for entry in tuned.entries[:count] for x in entry.expressions]
    operations = [*expressions, f":reduce_sum@|no operation {count}"]
    rules = jt.MOSTLY_HALF.replace(operations=dict.fromkeys(operations, "float32"))
    half_loss = jt.autocast(case.loss_fn, "float16", rules=rules)

    def trial(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        return jax.value_and_grad(lambda params: tuned.loss_scale * half_loss(params, batch).astype("float32"))(params)

    began = time.perf_counter()
    compiled = jax.jit(trial).lower(*case.examples[0]).compile()
    for example in case.examples[:-1]:
        jax.block_until_ready(compiled(*example))
    return time.perf_counter() - began


if __name__ == "__main__":
    main()

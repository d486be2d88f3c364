"""An equinox MLP on a table of numbers: scikit-learn's tumors, or a CSV file whose last column is the class.

    jmp-train train examples/tasks/table_mlp.py:task --csv table.csv --width 256

A pandas table comes in by `DataFrame.to_numpy()`.
"""

import dataclasses
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import jmp_train as jt


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the job.

    Args:
      csv: a table of numbers below a header; default: scikit-learn's breast cancer data.
      width: size of the hidden layers.
      learning_rate: AdamW's.
    """

    csv: Path | None = None
    width: int = 64
    learning_rate: float = 1e-3


def task(options: Options) -> jt.Task:
    """Returns the job: a quarter of the rows is held out."""
    tumors: Any = load_breast_cancer()
    table = np.column_stack([tumors.data, tumors.target])
    if options.csv is not None:
        table = np.loadtxt(options.csv, delimiter=",", skiprows=1)
    train, test = (np.asarray(rows) for rows in train_test_split(table, random_state=0))
    scaler: Any = StandardScaler().fit(train[:, :-1])

    def columns(rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"x": scaler.transform(rows[:, :-1]).astype(np.float32), "y": rows[:, -1].astype(np.int32)}

    def make_mlp(key: jax.Array) -> Any:
        mlp = eqx.nn.MLP(table.shape[1] - 1, int(table[:, -1].max()) + 1, options.width, depth=2, key=key)
        return eqx.partition(mlp, eqx.is_array)

    def metrics(params: Any, model_state: Any, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        logits = jax.vmap(eqx.combine(params, make_mlp(jax.random.key(0))[1]))(batch["x"]).astype("float32")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return {"accuracy": (logits.argmax(-1) == batch["y"]).mean(dtype="float32"), "loss": losses.mean()}

    return jt.Task(
        init=lambda key: (make_mlp(key)[0], None),
        loss_fn=jt.stateless(lambda params, batch: metrics(params, None, batch)["loss"]),
        optimizer=optax.adamw(options.learning_rate),
        train=columns(train),
        batch_size=32,
        epochs=20,
        test=columns(test),
        metrics=metrics,
    )

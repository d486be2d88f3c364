"""ColossalAI's benchmark of its AMP modes as a JAX script: ViT-B/16 on a folder of images, in any mode.

    python examples/vit_imagenet.py --data-dir DIR --mode torch       # DIR/train/CLASS/*.jpg, DIR/val/CLASS/*.jpg
    python examples/vit_imagenet.py --synthetic --image-size 64 --mode apex-O2

Without the lines marked AMP it trains in float32. On a CPU take --synthetic, small images and few of them.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_train as jt
from jmp_train.loading import test_batches, train_batches
from jmp_train.tasks import load_task
from jmp_train.tasks.task import TaskOptions
from jmp_train.tasks.vit import normalised, schedule
from jmp_train.tasks.vit_model import VisionTransformer

MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "torch": {"fp16": {"mode": jt.AmpType.TORCH}},
    "apex-O1": {"fp16": {"mode": jt.AmpType.APEX, "opt_level": "O1"}},
    "apex-O2": {"fp16": {"mode": jt.AmpType.APEX, "opt_level": "O2"}},
    "apex-O3": {"fp16": {"mode": jt.AmpType.APEX, "opt_level": "O3"}},
    "naive": {"fp16": {"mode": jt.AmpType.NAIVE, "initial_scale": 2.0**16}},
}


def main(args: argparse.Namespace) -> None:
    """Trains, and prints the loss of each epoch and the test accuracy."""
    options = TaskOptions(
        args.data_dir, args.synthetic, args.train_size, image_size=args.image_size
    )
    task = load_task("vit-b16", options)  # the data; model, loss and optimizer follow
    epochs = task.epochs if args.epochs is None else args.epochs
    steps_per_epoch = len(task.train["label"]) // args.batch_size
    classes = int(task.train["label"].max()) + 1

    model = VisionTransformer(classes)
    images = jax.ShapeDtypeStruct((1, args.image_size, args.image_size, 3), jnp.float32)
    init = jax.jit(lambda key: model.init(key, jnp.zeros(images.shape), train=False))
    params = init(jax.random.key(0))["params"]

    def loss_fn(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        pixels = normalised(batch["image"], params["head"]["kernel"].dtype)
        logits = model.apply({"params": params}, pixels, train=True, rngs={"dropout": rng})
        losses = optax.softmax_cross_entropy_with_integer_labels(
            jnp.asarray(logits, jnp.float32), batch["label"]
        )
        return losses.mean(), (state, None)

    def predict(params: Any, state: Any, images: Any) -> Any:
        del state
        return model.apply(
            {"params": params}, normalised(images, params["head"]["kernel"].dtype), train=False
        )

    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.add_decayed_weights(0.1),
        optax.sgd(schedule(epochs * steps_per_epoch)),
    )

    amp = jt.amp_from_config(MODES[args.mode])  # AMP
    amp, model = amp.for_model(model, images, train=False)  # AMP
    loss_fn, tx = amp.transform(loss_fn, tx)  # AMP
    predict = amp.forward(predict)  # AMP

    step = jax.jit(jt.train_step(loss_fn, tx), donate_argnums=0)
    state = jt.TrainState.create(
        params, tx, rng=jax.random.key(1), cast_params=amp.cast_params
    )  # AMP: cast_params

    losses, start = [], time.perf_counter()
    for batch in train_batches(task, args.batch_size, seed=0, epochs=epochs):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        if len(losses) == steps_per_epoch:
            mean, seconds = float(np.mean(losses)), time.perf_counter() - start
            print(
                f"epoch {int(state.step) // steps_per_epoch}  loss {mean:.4f}  loss scale {metrics['loss_scale']:g}  "
                f"skipped {metrics['skipped_steps']}  {seconds:.1f} s"
            )
            losses, start = [], time.perf_counter()
    correct = 0
    for batch, count in test_batches(task, args.batch_size):
        logits = jax.jit(predict)(state.params, state.model_state, batch["image"])
        correct += int(np.sum(np.argmax(logits[:count], -1) == batch["label"][:count]))
    print(f"test accuracy {correct / len(task.test['label']):.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data-dir", type=Path, metavar="DIR", help="with train/CLASS and val/CLASS")
    data.add_argument("--synthetic", action="store_true", help="made-up images of ten classes")
    parser.add_argument(
        "--image-size", type=int, default=224, metavar="N", help="a multiple of 16; default: 224"
    )
    parser.add_argument(
        "--train-size", type=int, metavar="N", help="only the first N training rows"
    )
    parser.add_argument("--epochs", type=int, help="default: 300, of made-up images 1")
    parser.add_argument("--batch-size", type=int, default=128, help="default: 128")
    parser.add_argument("--mode", choices=MODES, default="torch", help="default: torch")
    main(parser.parse_args())

"""A temporal graph network in float16: memory of nodes, and neighbors before a time, on a stream of events.

    python examples/tgn_stream.py [--no-use-fp16] [--no-memory] [--events 1000000]

Users choose items of one of many topics, and change their topic from time to time, so who is connected next follows
from recent events. Each event updates the memory of its two nodes by a GRU; a batch is scored with the memory from
earlier batches, and with the mean of the latest items before its time, and only then is it learned. Expected on a
million events: an AUC of 0.93 on the last tenth of the stream, and of 0.80 with `--no-memory`, where a node has only a
learned row.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_train as jt
from jmp_train import graphs

USERS, ITEMS, TOPICS, STAY, WIDTH, BATCH, NEIGHBORS = 2_000, 1_000, 50, 0.98, 32, 1_000, 5
NODES = USERS + ITEMS


def drawn_stream(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns the user and the item of each event, in order; an item has the id of its node."""
    users = random.integers(0, USERS, count)
    order = np.argsort(users, kind="stable")
    changes = (random.random(count) > STAY) | (np.diff(users[order], prepend=-1) != 0)
    places = np.maximum.accumulate(np.where(changes, np.arange(count), 0))
    topics = np.empty(count, np.int64)
    topics[order] = random.integers(0, TOPICS, count)[places]  # the same until the user's next change
    items = topics + TOPICS * random.integers(0, ITEMS // TOPICS, count)
    return users, USERS + np.where(random.random(count) < 0.9, items, random.integers(0, ITEMS, count))


class TGN(nnx.Module):
    """Rows of nodes, whose products are the logits of events; it has no code for precision."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rows = nnx.Embed(NODES, WIDTH, rngs=rngs)
        self.cell = nnx.GRUCell(2 * WIDTH, WIDTH, rngs=rngs)
        self.of_users, self.of_items = (nnx.Linear(3 * WIDTH, WIDTH, rngs=rngs) for _ in range(2))

    def updated(self, memory: jax.Array, last: jax.Array, nodes: jax.Array) -> jax.Array:
        """Returns the memory of nodes [..., width] after the last event of each, whose other end is `last`, or -1."""
        others = jnp.maximum(last[nodes], 0)
        message = jnp.concatenate([self.rows(others), memory[others]], axis=-1)
        new = self.cell(memory[nodes], message)[0]
        return jnp.where((last[nodes] >= 0)[..., None], new, memory[nodes])

    def embedded(self, nodes: jax.Array, own: jax.Array, near: jax.Array, layer: nnx.Linear) -> jax.Array:
        """Returns rows of nodes [..., width], from their memory and the neighbors' mean."""
        return layer(jnp.concatenate([self.rows(nodes), own, near], axis=-1))


def main(use_fp16: bool, memory: bool, events: int) -> None:
    """Trains on the stream, and prints the AUC of its last tenth, each event scored before it was learned."""
    random = np.random.default_rng(0)
    users, items = drawn_stream(events, random)
    times = np.arange(events)
    index = graphs.host_edges(items, users, NODES, times=times)  # the items that each user has chosen
    policy = "autocast_float16" if use_fp16 else "float32"
    structure, params = nnx.split(TGN(nnx.Rngs(0)))
    empty = {"memory": jnp.zeros((NODES, WIDTH)), "last": jnp.full(NODES, -1)}

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: Any) -> Any:
        del rng
        model = nnx.merge(structure, params)
        table, last = model_state["memory"], model_state["last"]
        users, items, near = batch["users"], batch["items"], batch["near"]  # items [2, batch], the second are negatives
        of_users, of_items = model.updated(table, last, users), model.updated(table, last, items)
        if memory:
            is_item = (near >= 0)[..., None]
            rows = jnp.where(is_item, model.rows(jnp.maximum(near, 0)), 0)
            means = rows.sum(1) / jnp.maximum(is_item.sum(1), 1)
        else:
            of_users, of_items = jnp.zeros_like(of_users), jnp.zeros_like(of_items)
            means = jnp.zeros_like(of_users)
        sent = model.embedded(users, of_users, means, model.of_users)
        received = model.embedded(items, of_items, jnp.zeros_like(of_items), model.of_items)
        logits = (sent.astype(jnp.float32) * received.astype(jnp.float32)).sum(-1)
        labels = jnp.array([[1.0], [0.0]]) * jnp.ones_like(logits)
        loss = optax.sigmoid_binary_cross_entropy(logits, labels).mean()
        nodes, others = jnp.concatenate([users, items[0]]), jnp.concatenate([items[0], users])
        event = jnp.full(NODES, -1).at[nodes].max(jnp.arange(2 * BATCH))  # the last one of each node in the batch
        new = jax.lax.stop_gradient(jnp.concatenate([of_users, of_items[0]])).astype(jnp.float32)
        state = {
            "memory": jnp.where((event >= 0)[:, None], new[event], model_state["memory"]),
            "last": jnp.where(event >= 0, others[event], last),
        }
        return loss, (state, logits)

    tx = jt.with_loss_scale(optax.adam(3e-3), jt.torch_loss_scale(enabled=use_fp16))
    step = jax.jit(jt.train_step(loss_fn, tx, policy=policy), donate_argnums=0)
    state = jt.TrainState.create(params, tx, model_state=empty)
    scores, metrics = [], {}
    for first in range(0, events - BATCH + 1, BATCH):
        part = slice(first, first + BATCH)
        near = graphs.temporal_neighbors(index, users[part], np.full(BATCH, first), NEIGHBORS).nodes
        negatives = USERS + random.integers(0, ITEMS, BATCH)
        both = np.stack([items[part], negatives])
        state, metrics = step(state, {"users": jnp.asarray(users[part]), "items": jnp.asarray(both), "near": near})
        scores.append(metrics["aux"])
    found = np.concatenate([np.asarray(each) for each in scores[-max(len(scores) // 10, 1) :]], axis=1)
    labels = np.repeat([1, 0], found.shape[1])
    print(f"loss {metrics['loss']:.3f}  AUC {graphs.roc_auc(labels, found.ravel()):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--events", type=int, default=1_000_000)
    main(**vars(parser.parse_args()))
